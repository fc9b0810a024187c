from .from_data import new_from_data as new_from_data
