from .advantage import Advantages as Advantages
from .advantage import advantages as advantages
from .loss import PolicyLoss as PolicyLoss
from .loss import policy_loss as policy_loss
from .rollouts import from_wire as from_wire
from .rollouts import join as join
from .rollouts import to_wire as to_wire
