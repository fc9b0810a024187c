from .roles import Role as Role
from .stage_checks import PlannedGroup as PlannedGroup
from .stage_checks import StageChecks as StageChecks
from .stage_planning import OwnWorkers as OwnWorkers
from .stage_planning import StagePlanning as StagePlanning
from .stage_planning import StepWork as StepWork
