from .beams import beam_search as beam_search
from .corpus import Corpus as Corpus
from .corpus_items import as_array as as_array  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .corpus_items import read_items as read_items  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .exhaustive import score_items as score_items
from .exhaustive import top_items as top_items
from .fitting import Held as Held
from .fitting import fit as fit
from .logprob import log_prob as log_prob
from .memory import MEMORY_WEIGHTS as MEMORY_WEIGHTS
from .memory import attach as attach
from .memory import leaf_scores as leaf_scores
from .memory import memory_weights as memory_weights
from .memory import nearest_share as nearest_share
from .memory import policy_log_prob as policy_log_prob
from .memory import remember as remember
from .memory import voted_shares as voted_shares
from .nearest import QUERY as QUERY
from .nearest import mixed_votes as mixed_votes
from .nearest import nearest_loss as nearest_loss
from .recommender import Recommender as Recommender
from .recommender import keys_of as keys_of
from .recommender import on as on
from .trie import Trie as Trie
from .votes import VoteOptions as VoteOptions
from .votes import Voters as Voters
from .votes import Votes as Votes
