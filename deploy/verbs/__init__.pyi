from . import listing as listing
from . import questions as questions
from . import serving as serving
