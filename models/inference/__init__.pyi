from .engine import Engine as Engine
from .question import Answer as Answer
from .question import Events as Events
from .question import Question as Question
from .question import packed as packed
from .question import usual_columns as usual_columns
from .states import States as States
from .tensor_batch import TensorBatch as TensorBatch
