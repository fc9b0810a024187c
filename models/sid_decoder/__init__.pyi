from .loss import sid_loss as sid_loss
