from . import doctor as doctor
from .measures import calibrate as calibrate
