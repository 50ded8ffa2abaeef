"""What happens to a document between reading and tokenising: it is mended, then it must pass the rules."""

from mlm.corpus.clean.fix_text import mend, mend_pieces
from mlm.corpus.clean.language import SAMPLE, LanguageFilter, long_sample
from mlm.corpus.clean.long_quality import LongMeasures
from mlm.corpus.clean.quality import active_rules, broken_by, broken_rule
from mlm.corpus.read.long_text import Letters, LongText, Scratch
from mlm.corpus.sections import FilterConfig, NormaliseConfig

LANGUAGE = "language"


class Cleaner:
    """Mends a text and names the rule that drops it.

    Raises UserError for languages that are not known or when the detector is not installed.
    """

    def __init__(self, normalise: NormaliseConfig, filter: FilterConfig) -> None:
        self.mends, self.rules = normalise.ftfy, active_rules(filter)
        self.is_wanted = (
            LanguageFilter(normalise.languages, normalise.min_language_score) if normalise.languages else None
        )

    def __call__(self, text: str) -> tuple[str, str | None]:
        """The mended text, and `language` or the key of FilterConfig that drops it; None to keep it.

        A text of nothing but white space passes (`min_words` aside); `min_tokens` is the tokenizer's affair.
        """
        if self.mends:
            text = mend(text)
        if not text or text.isspace():
            return text, broken_rule(text, self.rules)
        if self.is_wanted is not None and not self.is_wanted(text):
            return text, LANGUAGE
        return text, broken_rule(text, self.rules)

    def long(self, text: LongText, scratch: Scratch) -> str | None:
        """Write a long text to `scratch`, mended; the rule that drops it, None to keep it."""
        for piece in mend_pieces(text.pieces) if self.mends else text.pieces():
            scratch.add(piece)
        if self.is_wanted is not None and not scratch.is_blank:
            letters = Letters(scratch.text)
            short = len(letters) <= 3 * SAMPLE
            if not self.is_wanted.accepts(scratch.text.read() if short else long_sample(letters)):
                return LANGUAGE
        return broken_by(LongMeasures(scratch.text.pieces), self.rules) if self.rules else None
