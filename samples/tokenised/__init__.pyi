from .stored import StoredSequences as StoredSequences
from .stored import UserEvents as UserEvents
