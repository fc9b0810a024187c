from .session import Session as Session
