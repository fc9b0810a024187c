from .align import AlignLearner as AlignLearner
from .policy import PolicyLearner as PolicyLearner
from .supervised import SupervisedLearner as SupervisedLearner
