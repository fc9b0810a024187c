from . import doctor as doctor
from .calibrate import calibrate as calibrate
