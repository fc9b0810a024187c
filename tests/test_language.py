"""Names and docstrings keep to docs/contributing rules: verb phrases, unique class names, private functions explained.

`python tests/test_language.py [FOLDER ...]` prints what is open in each folder.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [
    "attention",
    "embedding",
    "samples",
    "models",
    "rl",
    "workers",
    "controller",
    "deploy",
    "bench",
    "src/nonet",
]
VERBS = set(
    """
    abandon absorb accept accumulate acquire activate adapt add adjust admit advance aggregate align allocate allow
    analyse announce answer append apply approximate arrange ask assemble assert assign associate atomise attach attend
    audit authenticate authorise average await backward balance batch begin bench benchmark bin bind bisect block boost
    bootstrap bound broadcast browse bucket buffer build bump bundle cache calculate calibrate call cancel cap carry cast
    catch center centre change charge check choose chunk claim clamp classify clean clear click clip clone close cluster
    coalesce collapse collate collect combine commit compact compare compile complete compose compress compute concat
    concatenate condense configure confirm conform connect consume continue contribute convert copy correct correlate
    count cover crash create crop cut debug decay decide declare decode decompress decrypt dedupe deduplicate defer define
    delete deliver demote dequantise derive describe deserialise destroy detach detect determine diff differentiate digest
    dilate disable discard disconnect discount discover dispatch display distribute divide download downgrade draft drain
    draw drive drop dump duplicate echo elect embed emit empty enable encode encrypt end enforce engage enqueue ensure
    enter enumerate erase escape estimate evaluate evict examine exchange exclude execute exercise exhaust exit expand
    expect expire explain export expose extend extract factorise fail fetch fill filter finalise find finish fit fix
    flatten flip flush fold follow forbid force forecast forget fork format forward freeze fuse gather generate get give
    go grant group grow guard guess halve handle hash heal hide highlight hold ignore import impute include increment
    index infer inflate inherit init initialise inject insert inspect install instantiate integrate intercept interleave
    interpolate interpret interrupt intersect invalidate invert invoke isolate iterate join journal judge keep kill label
    launch learn lease leave lift limit link list listen load locate lock log look lower make manage map mark mask match
    materialise measure merge migrate mirror mix mock modify monitor mount move multiply mutate name narrow negate
    negotiate nest normalise note notice notify number observe obtain offer offload omit open operate optimise order
    orthogonalise overlap override overwrite pack package pad paginate paint parallelise park parse partition pass paste
    patch pause perform permute persist perturb pick pin ping place plan play plot plug poison poll pop populate post
    predict prefer prefetch prefill prefix prepare prepend preserve print probe process produce profile project promote
    propagate propose protect prove provide prune publish pull purge push put quantise quarantine query queue quicken
    quote raise randomise rank reach read realise reap rearrange rebind rebuild recall receive recombine recommend
    recompute reconcile reconnect reconstruct record recover recreate recycle redirect reduce refer refill refine refresh
    refuse register regroup regularise rehearse reinforce reject relate relax relay release reload relocate remap remember
    remove rename render renew renumber reopen reorder reorganise repack repair repeat replace replan replay replicate
    reply report represent reproduce request require requeue rerank rerun resample rescale rescore reserve reset reshape
    reshard resize resolve respond restart restore restrict resume retain retire retract retrieve retry return reuse
    reverse revert review revise revive revoke rewind rewrite roll rotate round route run sample sanitise satisfy save
    scale scan scatter schedule score scrape scrub seal search seed seek segment select send separate sequence serialise
    serve set settle shape shard share shift ship shorten show shrink shuffle shut sign signal simplify simulate sketch
    skip sleep slice smooth snapshot solve sort spawn specialise specify speed spill split spread squash squeeze stack
    stage stamp standardise start stash state steer step stitch stop store stream stretch strip structure submit subscribe
    subset subsample substitute subtract suggest sum summarise supervise supply support suppress suspend swap sweep switch
    symlink sync synchronise synthesise tag take tally tear tell terminate test tidy tighten time toggle tokenise touch
    trace track train transfer transform translate transpose traverse treat trigger trim truncate try tune turn unbind
    undo unflatten unfreeze unify uninstall unlink unload unlock unmap unpack unpublish unquote unregister unroll unscale
    unshard unsubscribe untie unwatch unwind unwrap update upgrade upload upsert use validate vary verify view visit vote
    wait wake walk warm warn watch weigh widen withdraw withhold work wrap write yield zero zip reproject rollback
    tokenize normalize quantize orthogonalize tick climb ascend capture condition delay deploy descend identify pool
    reread whiten access approve host multi
    """.split()  # noqa: SIM905
)
PREDICATES = {
    "is",
    "are",
    "has",
    "have",
    "needs",
    "need",
    "can",
    "should",
    "must",
    "may",
    "does",
    "contains",
    "supports",
    "uses",
    "accepts",
}
CONVERSIONS = {"to", "as", "from"}
# Quantities, operators and protocol methods that have these names in the field or in the library that calls them.
STANDARD = {
    *[
        "accuracy",
        "auc",
        "coverage",
        "diversity",
        "entropy",
        "gini",
        "hit_rate",
        "intra_list_distance",
        "ndcg",
        "ndcg_at_k",
        "novelty",
        "precision_at_k",
        "recall",
        "recall_at_k",
    ],
    *[
        "bce",
        "cross_entropy",
        "gelu",
        "kl_divergence",
        "l2_norm",
        "layer_norm",
        "log_prob",
        "log_probs",
        "log_sigmoid",
        "log_softmax",
        "logits",
        "logsumexp",
        "relu",
        "rms_norm",
    ],
    *[
        "sigmoid",
        "silu",
        "softmax",
        "softplus",
        "tanh",
        "rope",
        "main",
        "rng",
        "size",
        "nbytes",
        "state_dict",
        "load_state_dict",
        "parameters",
        "named_parameters",
    ],
    *["fieldnames", "items", "keys", "values", "column", "columns", "lifespan", "device_tensors"],
    # Operators and look-ups of the field, of NumPy, PyTorch, transformers and of feature stores.
    *[
        "uni_attention",
        "attention_forward",
        "legal_log_softmax",
        "splitmix64",
        "lookup",
        "multi_get",
    ],
    *["astype", "tolist", "synchronize", "autocast"],
    # Life cycle of a role and of a reward, the future's predicate, and the decorator of group methods: public interface.
    *["setup", "teardown", "done", "method", "reward"],
    # Contracts of plug-ins: what a baseline and a model answer. Plug-ins outside the package implement and call them.
    *["scores", "votes", "states", "targets", "target_positions", "teacher_forced_logits", "hidden_matrices"],
}
# Names that a user or another program types, by file.
GIVEN = {
    # Device functions of Triton; their names appear in profiles beside those of CUDA kernels.
    "attention/kernels/triton_backward.py": {"dq_kernel", "dkv_kernel"},
    "attention/kernels/triton_bias.py": {"bias_kernel"},
    "attention/kernels/triton_score.py": {"dot"},
    "attention/plans/triton_plan.py": {"summary_kernel", "key_kernel"},
    # The argument of torch's LBFGS.
    "models/clicks/baselines.py": {"closure"},
    # The method of pydantic's models.
    "controller/scenario/document/hidden.py": {"model_copy"},
    # Rewards are named in scenarios.
    "rl/rewards/shipped.py": {"hit"},
    # Commands of the command line, and the function of the public interface that loads a scenario.
    "workers/runtime/rendezvous/actor_store.py": {"num_keys"},  # of torch.distributed.Store
    "deploy/verbs/authoring.py": {"scenarios", "new", "schema", "manifest"},
    "deploy/verbs/checking.py": {"doctor", "parity", "chaos"},
    "deploy/verbs/questions.py": {"runs", "tradeoff"},
    "deploy/verbs/serving.py": {"top", "versions"},
    "deploy/verbs/watching.py": {"status", "logs", "why", "job"},
    # The method of Ray's job client through which all of its requests go.
    "deploy/run/jobs/client.py": {"_do_request"},
    "deploy/run/api.py": {"scenario"},
    # Handlers that are found by the kind of an event, and the callback of Ray Tune.
    "deploy/run/panel.py": {"_result"},
    "deploy/tune/search.py": {"on_trial_complete"},
    # A method of exported recommenders, and operation ids of the HTTP interface.
    "deploy/serving/offline/exported.py": {"titles"},
    "deploy/serving/service/app.py": {"events", "examples", "healthz", "readyz", "versions", "metrics"},
    # Sections of benchmarks are named on the command line; doubles have the names of what they stand for.
    "bench/embedding/sections.py": {"rows_1m", "rows_8m", "small", "adam", "growth", "eviction", "rows_100m"},
    "bench/cluster/dispatch_roles.py": {"nop"},
    "bench/cluster/startup_group.py": {"nop"},
    "bench/rl/asynchronous.py": {"tables", "metrics", "event"},
    "bench/runs/rl_steps.py": {"tables", "metrics"},
    # The Thrift interface of HBase.
    "bench/samples/hbase_standin.py": {
        *["getTableNames", "getColumnDescriptors", "getRowsWithColumns", "getRowsWithColumnsTs"],
        *["getRowWithColumns", "getRowWithColumnsTs", "getVerTs", "mutateRows", "mutateRowsTs"],
        *["scannerOpenWithScan", "scannerGetList", "scannerClose"],
    },
}


def list_files(folder: str) -> list[Path]:
    root = ROOT / folder
    found = root.glob("*.py") if folder == "src/nonet" else root.rglob("*.py")
    return sorted(f for f in found if "__pycache__" not in f.parts)


Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def read_definitions(path: Path) -> tuple[list[tuple[Function, ast.AST]], list[ast.ClassDef]]:
    """Return the functions of a file, each with the statement or module around it, and the classes of its top level."""
    tree = ast.parse(path.read_text())
    return list(iterate_functions(tree)), [node for node in tree.body if isinstance(node, ast.ClassDef)]


def iterate_functions(parent: ast.AST) -> Iterator[tuple[Function, ast.AST]]:
    """Yield functions and their parents; only statements have functions in them, so expressions are left out."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        children = getattr(parent, field, ())
        for node in children if isinstance(children, list) else ():  # `a if b else c` has a body too
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node, parent
            yield from iterate_functions(node)


def is_well_named(function: ast.FunctionDef | ast.AsyncFunctionDef, parent: ast.AST) -> bool:
    """Return whether a name is a verb phrase or one of the exceptions of the house style."""
    name = function.name
    decorators = {ast.unparse(d).split("(")[0].split(".")[-1] for d in function.decorator_list}
    if name.startswith("__") or decorators & {
        "property",
        "cached_property",
        "setter",
        "overload",
        "override_name",
    }:
        return True
    bare = name.strip("_")
    first = bare.split("_")[0]
    if first in VERBS | PREDICATES | CONVERSIONS or bare in STANDARD or bare.startswith("visit_"):
        return True
    if isinstance(parent, ast.ClassDef) and decorators & {"classmethod", "staticmethod"} and function.returns:
        return ast.unparse(function.returns).strip("'\"") in {
            parent.name,
            "Self",
        }  # an alternative constructor
    return False


def find_bad_names(folder: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in list_files(folder)
        for node, parent in read_definitions(path)[0]
        if not is_well_named(node, parent) and node.name not in GIVEN.get(str(path.relative_to(ROOT)), ())
    ]


def find_unexplained(folder: str) -> list[str]:
    """Private functions of more than five lines without a docstring."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has no docstring"
        for path in list_files(folder)
        for node, parent in read_definitions(path)[0]
        if node.name.startswith("_")
        and not node.name.startswith("__")
        and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or 0) - node.body[0].lineno + 1 > 5
        and not ast.get_docstring(node)
    ]


def find_incomplete_args(folder: str) -> list[str]:
    """Docstrings with an `Args:` section that leaves out a parameter."""
    found = []
    for path in list_files(folder):
        for node, _ in read_definitions(path)[0]:
            text = ast.get_docstring(node) or ""
            arguments = node.args
            names = [
                a.arg
                for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                if a.arg not in ("self", "cls")
            ]
            if "Args:\n" in text:
                missing = [
                    n
                    for n in names
                    if not n.startswith("_") and f" {n}:" not in text and f" {n} (" not in text
                ]
                if missing:
                    found.append(
                        f"{path.relative_to(ROOT)}:{node.lineno}: Args of {node.name} lacks {', '.join(missing)}"
                    )
    return found


def find_repeated_classes() -> dict[str, list[str]]:
    places = defaultdict(list)
    for folder in FOLDERS:
        for path in list_files(folder):
            for node in read_definitions(path)[1]:
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}


def test_functions_are_named_by_verb_phrases():
    assert not [bad for folder in FOLDERS for bad in find_bad_names(folder)]


def test_private_functions_say_what_they_do():
    assert not [bad for folder in FOLDERS for bad in find_unexplained(folder)]


def test_the_args_are_complete():
    assert not [bad for folder in FOLDERS for bad in find_incomplete_args(folder)]


def test_class_names_are_unique():
    assert not find_repeated_classes()


if __name__ == "__main__":
    chosen = sys.argv[1:]
    if not chosen:
        for folder in FOLDERS:
            print(
                folder,
                len(find_bad_names(folder)),
                "names,",
                len(find_unexplained(folder)),
                "without docstring,",
                len(find_incomplete_args(folder)),
                "Args",
            )
        print(len(find_repeated_classes()), "class names occur more than once")
    for folder in chosen:
        print("\n".join([*find_bad_names(folder), *find_unexplained(folder), *find_incomplete_args(folder)]))
