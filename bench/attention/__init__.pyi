from .suite import attention as attention
