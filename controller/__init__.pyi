from .single_controller import SingleController as SingleController
from .single_controller import Task as Task
