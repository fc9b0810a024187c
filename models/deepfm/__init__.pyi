from .deepfm import DeepFM as DeepFM
from .deepfm import build as build
