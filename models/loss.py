"""STAND-IN by the lead to test the pipeline; helper `model` overwrites this file."""


def sid_loss(model, batch, rows):
    return model.nll(batch, rows)
