from .loss import sid_loss as sid_loss
from .protocol import build_model as build_model
