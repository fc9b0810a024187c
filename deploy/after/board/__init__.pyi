from .board import format_board as format_board
from .board import read_board as read_board
from .board import run_board as run_board
