"""`filter.min_tokens` of documents, and of one text."""

import pytest

from mlm.cli.compose.composition import load_config
from mlm.corpus.build import with_min_tokens
from mlm.corpus.config import DataBuildConfig
from tests.slow import thinned


@pytest.mark.parametrize(
    "typed, of_documents, of_one_text",
    thinned([([], 128, None), (["128"], 128, 128), (["5"], 5, 5), (["null"], None, None)], 2),
)
@pytest.mark.parametrize("recipe", ["v1", "gopher"])
def test_typed_min_tokens_holds_for_one_text_and_the_default_is_off(
    recipe: str,
    typed: list[str],
    of_documents: int | None,
    of_one_text: int | None,
) -> None:
    chosen = [f"filter.min_tokens={value}" for value in typed]
    words = ["input=book.txt", "tokenizer=gpt2", "out=corpus", f"recipe={recipe}", *chosen]
    config: DataBuildConfig = load_config("data_build", words)
    assert with_min_tokens(config, is_one_text=False).filter.min_tokens == of_documents
    assert with_min_tokens(config, is_one_text=True).filter.min_tokens == of_one_text
