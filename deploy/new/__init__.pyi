from .from_data import create_from_data as create_from_data
