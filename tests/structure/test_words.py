"""The pages of docs/ have at most 45,000 words. A new page needs a shorter old one."""

from __future__ import annotations

from tests.structure import words


def test_pages_have_at_most_their_number_of_words() -> None:
    pages = words.by_page()

    assert len(pages) > 50
    assert sum(pages.values()) <= words.MAX_WORDS, "python -m tests.structure.words shows the largest pages"
