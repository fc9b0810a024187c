from . import doctor as doctor
