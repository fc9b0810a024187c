from ._histories import VoteScorer as VoteScorer
from ._rehearsal import check_scores as check_scores
from ._rehearsal import rehearse as rehearse
