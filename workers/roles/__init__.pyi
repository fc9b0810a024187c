from .embedding import EmbeddingShard as EmbeddingShard
from .learner import CheckpointPart as CheckpointPart
from .learner import LearnerContext as LearnerContext
from .learner import StageLearner as StageLearner
from .reward import RewardWorker as RewardWorker
from .rollout import Rollout as Rollout
from .settings import CHUNK_TOKENS as CHUNK_TOKENS
from .settings import SUPERVISED as SUPERVISED
from .settings import KnownRun as KnownRun
from .settings import RolloutRequest as RolloutRequest
from .settings import RunSetup as RunSetup
from .settings import SceneSetup as SceneSetup
from .settings import Schedule as Schedule
from .settings import StageSetup as StageSetup
from .settings import UpdateRequest as UpdateRequest
from .settings import Weights as Weights
from .settings import make_ranks_name as make_ranks_name
from .tokenizer import PREPARING as PREPARING
from .tokenizer import BuiltData as BuiltData
from .tokenizer import DataSetup as DataSetup
from .tokenizer import Tokeniser as Tokeniser
from .tokenizer import check_sequences as check_sequences
from .tokenizer import describe_data as describe_data  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .tokenizer import make_sequences as make_sequences  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .tokenizer import read_preparation_facts as read_preparation_facts
from .tokenizer import store_artifact as store_artifact
from .tokenizer import write_sids as write_sids
from .trainer import Trainer as Trainer
