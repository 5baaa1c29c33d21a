"""docs/numerics.md says what the tests check: its digests are pinned ones, its sections are those that are cited."""

import re

from tests import digests

SECTION = re.compile(r"^#{2,3} (\d+(?:\.\d+)?|Appendix [A-C])\b", re.MULTILINE)
# "docs/numerics.md 2.3", "docs/numerics.md, sections 4 and 10", "numerics 8.3".
CITATION = re.compile(r"numerics(?:\.md)?,? (?:sections? )?(\d+(?:\.\d+)?(?:(?:, | and | to )\d+(?:\.\d+)?)*)")


def page(repository):
    return (repository / "docs" / "numerics.md").read_text()


def cited(text):
    """Section numbers that `text` cites."""
    return {number for found in CITATION.findall(text) for number in re.findall(r"\d+(?:\.\d+)?", found)}


def test_every_digest_of_the_appendices_is_pinned(repository):
    """Features B9."""
    appendices = page(repository).split("## Appendix A", 1)[1]
    written = set(re.findall(r"\b[0-9a-f]{12}\b(?:/\d+)?", appendices))
    pinned = {pin.expected for pin in (*digests.APPENDIX_A, *digests.APPENDIX_C, *digests.FOLDS)}
    assert len(pinned) > 200
    assert pinned <= written, sorted(pinned - written)
    # What else the page prints is checked by tests/reference/test_digests.py, so it stands there as text.
    known = (repository / "tests/reference/test_digests.py").read_text() + (repository / "tests/digests.py").read_text()
    assert not sorted(value for value in written if value not in known)


def test_every_cited_section_exists(repository):
    sections = set(SECTION.findall(page(repository)))
    assert {"1", "2.2", "11", "Appendix C"} <= sections
    wrong = []
    for path in sorted([*(repository / "src").rglob("*.py"), *(repository / "tests").rglob("*.py")]):
        if path.name != "test_numerics_page.py":
            name = path.relative_to(repository).as_posix()
            wrong += [f"{name}: {number}" for number in sorted(cited(path.read_text()) - sections)]
    assert not wrong, "\n".join(wrong)


def test_citations_are_found():
    assert cited("docs/numerics.md 2.3, 3.2. Then (docs/numerics.md, sections 4 and 10), numerics 8.3") == {
        "2.3", "3.2", "4", "10", "8.3"
    }  # fmt: skip
    assert cited("docs/numerics.md, 2 to 5; docs/numerics.md, section 6.") == {"2", "5", "6"}
