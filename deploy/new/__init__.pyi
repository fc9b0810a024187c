from .from_data import create_from_data as create_from_data
from .from_data import make_data_section as make_data_section
from .sources import find_source as find_source
