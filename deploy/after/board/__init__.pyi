from .board import format_board as format_board
from .board import run_board as run_board
