"""What the pages draw is what the code says."""

from __future__ import annotations

import pytest

from tests.support.drawn import DRAWN, PAGES, with_drawings


@pytest.mark.parametrize("page", sorted({page for page, _ in DRAWN}))
def test_page_is_drawn_from_the_code(page: str) -> None:
    """``./dev run python -m tests.support.drawn`` draws it anew."""
    text = (PAGES / page).read_text()

    assert with_drawings(page, text) == text


def test_page_without_a_place_is_told() -> None:
    """A marker that somebody has deleted takes no picture along unseen."""
    with pytest.raises(ValueError, match="no place for states"):
        with_drawings("architecture.md", "text\n<!-- states -->\n")
