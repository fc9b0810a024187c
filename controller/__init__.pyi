from .single_controller import ControllerTask as ControllerTask
from .single_controller import SingleController as SingleController
