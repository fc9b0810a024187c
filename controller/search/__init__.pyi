from .placements import search_placements as search_placements
from .text import format_search as format_search
from .text import make_search_records as make_search_records
