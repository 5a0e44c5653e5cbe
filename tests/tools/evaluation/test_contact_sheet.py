import numpy as np

from toprovar.tools.evaluation.contact_sheet import CELL, INITIALS, RIGHT, WRONG, contact_sheet
from toprovar.tools.evaluation.scoring import ASPECTS

COLOUR = (1, 200, 240)  # that no text or mark has


def sheet(right):
    white, coloured = np.full((256, 256, 3), 255, np.uint8), np.full((256, 256, 3), COLOUR, np.uint8)
    pictures = [{"dense": white, "full": coloured}] * 7
    return np.asarray(contact_sheet([f"prompt {i}" for i in range(7)], pictures, [right] * 7, columns=3))


def test_every_prompt_and_variant_has_its_picture():
    found = sheet({"dense": {"concept": True}, "full": {"concept": True}})
    assert (found == COLOUR).all(-1).sum() == 7 * CELL * CELL


def test_marks_are_filled_if_right_and_crossed_if_wrong():
    def count(pixels, colour):
        return int((pixels == np.array(colour)).all(-1).sum())

    good, bad = ({aspect: value for aspect in ASPECTS} for value in (True, False))
    right, wrong = sheet({"dense": good, "full": good}), sheet({"dense": bad, "full": bad})
    assert count(right, RIGHT) > 14 * 6 * 50
    assert count(right, WRONG) == count(wrong, RIGHT) == 0
    assert count(wrong, WRONG) > 14 * 6 * 20
    assert count(sheet({"dense": good, "full": bad}), RIGHT) * 2 == count(right, RIGHT)


def test_every_aspect_has_a_letter_of_its_own():
    assert set(INITIALS) == set(ASPECTS)
    assert len(set(INITIALS.values())) == len(ASPECTS)
