from .placements import search_placements as search_placements
from .text import search_dict as search_dict
from .text import search_text as search_text
