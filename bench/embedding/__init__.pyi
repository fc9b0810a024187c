from .suite import embedding as embedding
