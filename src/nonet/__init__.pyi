from .controller.session import Session as Session
from .deploy.run import run as run
from .deploy.run import scenario as scenario
from .deploy.run import start as start
from .deploy.serving import Client as Client
from .rl.rewards import Reward as Reward
from .rl.rewards import reward as reward
from .types import Rollouts as Rollouts
from .workers.runtime import DistributeWorker as DistributeWorker
from .workers.runtime import GroupFuture as GroupFuture
from .workers.runtime import PerRank as PerRank
from .workers.runtime import Replicate as Replicate
from .workers.runtime import Shard as Shard
from .workers.runtime import WorkerGroup as WorkerGroup
from .workers.runtime import method as method

__version__: str
