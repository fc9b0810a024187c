from .streams import read as read
