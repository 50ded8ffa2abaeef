"""`mlm eval loss`: the score of a checkpoint on a corpus, printed and written."""

from pathlib import Path

from mlm.cli.evaluate.settings import EvalLossConfig
from mlm.cli.result import show_table
from mlm.convert.source import Source, open_source
from mlm.data.files_present import missing_pair
from mlm.data.receipt import check_corpus
from mlm.evaluate.loss import corpus_loss
from mlm.inference.trained import load_trained, open_predictor, window_length
from mlm.launch.rules.layout import CONTEXT_FITS, Launch
from mlm.launch.rules.nearest import layout_problems
from mlm.models.bert.model import PARTS
from mlm.models.family import family_of
from mlm.parallel.mesh import ParallelContext
from mlm.runs.checks import context_problem
from mlm.runs.config import PretrainConfig
from mlm.runs.corpora import validation_prefixes
from mlm.runs.tokenizer import other_tokenizer, receipt_tokenizer
from mlm.util.errors import UserError
from mlm.util.object_store import is_stored
from mlm.util.results import folder_problem, result_problems, target_name, write_result


def preflight(config: EvalLossConfig) -> list[str]:
    try:
        source = open_predictor(config.ckpt, config.parallel, causal=False)
        trained = source.config
        prefix = corpus_prefix(config, trained)
        seq_length = window_length(config.seq_length, trained)
        if check := family_of(trained.model.kind).check_tokenizer:
            check(source.load_tokenizer(config.tokenizer, any_size=True))
    except UserError as error:
        return list(error.problems)
    fix = "name a corpus that `mlm data build` wrote with the run's tokenizer.json"
    receipt = receipt_tokenizer(prefix.parent)
    if problem := other_tokenizer(f"path={prefix}", receipt, str(source.path), source.tokenizer_digest, fix):
        return [problem]
    cp = config.parallel.cp
    if context := context_problem(cp, trained.model, trained.data):
        return [context]
    values = {
        **{"cp": cp, "tp": config.parallel.tp, "sequence_parallel": False},  # no effect in evaluation
        **{"data.seq_length": seq_length, "model.max_positions": trained.model.max_positions},
    }
    names, launch = {"data.seq_length": "seq_length"}, Launch(None, None)
    if problems := layout_problems(values, launch, (CONTEXT_FITS,), names=names, fix_names=names):
        return list(problems)
    out = result_path(config, source, prefix)
    problem = folder_problem(out)
    return [
        *([problem] if problem else result_problems(out)),
        *check_corpus(prefix, vocab_size=trained.model.vocab_size, seq_length=1, min_samples=1),
        *([] if seq_length > 0 else [f"seq_length={seq_length}: use at least 1"]),
    ]


def corpus_prefix(config: EvalLossConfig, trained: PretrainConfig) -> Path:
    """The corpus to score: the one named, or the validation set of the run that wrote the checkpoint."""
    if config.path is not None:
        return Path(config.path)
    prefixes = validation_prefixes(trained.data)
    if not prefixes:
        give, path = "give path=… (prefix of a .bin/.idx)", trained.data.path
        if path and not (is_stored(path) or Path(path).exists()) and missing_pair(path):
            raise UserError(
                f"path=null: the run's data.path={path} is not below {Path.cwd()}; start in the folder that "
                f"the run was started in, or {give}"
            )
        raise UserError(f"path=null and the run had no validation set: {give}")
    if len(prefixes) > 1:
        choice = " or ".join(f"path={prefix}" for prefix in prefixes.values())
        raise UserError(f"path=null and the run mixed several corpora: give {choice}")
    return next(iter(prefixes.values()))


def result_path(config: EvalLossConfig, source: Source, prefix: Path) -> Path:
    """Path of the JSON receipt; validation sets of a blend share a name, so its corpora are named too."""
    name = f"{prefix.parent.name}-{prefix.name}" if source.config.data.blend else prefix.name
    return Path(config.out) if config.out else source.result_file(f"eval-loss-{name}.json")


def run(config: EvalLossConfig, ctx: ParallelContext) -> None:
    """Score the corpus; rank 0 writes a JSON receipt and prints a table."""
    trained = load_trained(open_source(config.ckpt), config.parallel, config.precision, ctx)
    prefix = corpus_prefix(config, trained.config)
    result = corpus_loss(
        trained,
        prefix,
        seq_length=window_length(config.seq_length, trained.config),
        batch_size=config.batch_size,
        tokenizer=config.tokenizer,
        ctx=ctx,
    )
    if result is None:
        return
    result |= {"precision": config.precision.dtype, **trained.facts()}
    out = result_path(config, trained.source, prefix)
    write_result(out, result)
    bits = result["bits_per_byte"]
    if "mlm_loss" in result:
        parts = {name: result[name] for name in PARTS if name in result}
        columns = {
            **({"samples#": f"{result['samples']:,}"} if "samples" in result else {}),
            "masked tokens#": f"{result['tokens']:,}",
            **{f"{name.replace('_', ' ')}#": f"{value:.4f}" for name, value in parts.items()},
            "perplexity#": f"{result['perplexity']:.2f}",
        }
    else:
        columns = {
            "tokens#": f"{result['tokens']:,}",
            "loss (nats/token)#": f"{result['loss']:.4f}",
            "perplexity#": f"{result['perplexity']:.2f}",
            "bits per byte#": "unknown: no readable tokenizer" if bits is None else f"{bits:.4f}",
        }
    title = f"eval loss · {result['corpus']} · step {result['step']}"
    show_table(title, columns, (), f"written to {target_name(out)}")
