"""Experiments made for tests, of programs that take no time."""

from collections.abc import Sequence

from mlm.reproduce.conclusion import Chart, Conclusion, Series, Table, Verdict
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.results import Results

WRITE = "import sys; open(sys.argv[1], 'x').write(sys.argv[2])"


def writing(name: str, content: str = "{}", **fields: object) -> Step:
    """Return a step that writes a file, and fails if it is there already."""
    result = f"results/{name}.json"
    settings: dict[str, object] = {"minutes": 0.1, "cores": 1, **fields}
    return Step(name=name, words=("python", "-c", WRITE, result, content), result=result, **settings)  # type: ignore[arg-type]


def concluded(results: Results) -> Conclusion:
    """Conclude from the number in each step's result."""
    values = [float(results.json(name)["value"]) for name in results.steps if not results.failed(name)]
    return Conclusion(
        verdict=Verdict.AGREES if sum(values) > 0 else Verdict.CONTRADICTS,
        seen=f"the values add up to {sum(values):g}",
        limits=("nothing else",),
        tables=(
            Table(title="Values | all", headings=("step", "value"), rows=[(n, 1.0) for n in results.steps]),
        ),
        charts=(
            Chart(
                name="values",
                title="Values <b>",
                x_label="step",
                y_label="value",
                series=(
                    Series(name="ours", x=(1, 2), y=(1.0, 2.0), low=(0.5, 1.5), high=(1.5, 2.5)),
                    Series(name="theirs", x=(1, 2), y=(1.0, 4.0), published=True),
                ),
            ),
        ),
        commands=(
            ("Train", "mlm pretrain model=gpt2_8b tp=8"),
            ("Again", "mlm pretrain model=gpt2_8b tp=4"),
        ),
    )


def experiment(steps: Sequence[Step]) -> Experiment:
    """Return an experiment of some steps."""

    def its_steps(config: ReproduceConfig) -> Sequence[Step]:
        return steps

    return Experiment(
        name="v1-made",
        title="A made experiment",
        source="a paper, figure 1",
        claim="Values add up to 3.",
        minutes=0.1,
        steps=its_steps,
        conclude=concluded,
    )
