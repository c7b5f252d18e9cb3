"""Finding things: what is asked, what is made of the answer, and boxes that land through turns and sizes."""

import json
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from tests.scripted_backend import ScriptedBackend, png
from vlfit.api.conversation import ImagePart, TextPart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.native import NativeBackend
from vlfit.errors import InvalidRequest, UnreadableAnswer, UsageError
from vlfit.tasks.boxes import SceneObject
from vlfit.tasks.describe import SCENE
from vlfit.tasks.drawing import draw_boxes, save_drawing
from vlfit.tasks.objects import Detection, detect, scene

FOX = (320, 350, 442, 468)  # its box in animals.png, by eye
EXAMPLES = Path(__file__).parents[2] / "examples" / "pictures"
TWO = json.dumps(
    [{"bbox_2d": [100, 200, 500, 800], "label": "cup"}, {"bbox_2d": [0, 0, 10, 10], "label": "plate"}]
)


def found_in(text: str) -> Detection:
    return detect(ScriptedBackend([text]), ImagePart(png(640, 480)), "cups")


def test_asks_for_the_things_and_gives_pixels() -> None:
    backend = ScriptedBackend([TWO])
    found = detect(backend, ImagePart(png(640, 480)), ' cups,\n "plates" ')
    [(conversation, sampling)] = backend.asked
    question = conversation[0].parts[1]
    assert isinstance(question, TextPart)
    assert '"cups, plates"' in question.text
    assert sampling.greedy
    assert [(thing.label, thing.box) for thing in found.objects] == [
        ("cup", (64, 96, 320, 384)),
        ("plate", (0, 0, 6, 5)),
    ]
    assert found.objects[0].box_1000 == (100, 200, 500, 800)
    assert (found.width, found.height, found.warnings) == (640, 480, ())


@pytest.mark.parametrize("text", ["[]", "```json\n[]\n```", '{"objects": []}'])
def test_nothing_found(text: str) -> None:
    assert found_in(text).objects == ()


def test_what_is_no_json_is_told() -> None:
    with pytest.raises(UnreadableAnswer):
        found_in("There are no cups.")


def test_there_must_be_something_to_look_for() -> None:
    with pytest.raises(InvalidRequest) as caught:
        detect(ScriptedBackend([]), ImagePart(png(640, 480)), '" "')
    assert caught.value.param == "things"


@pytest.fixture(scope="module")
def mini() -> Iterator[NativeBackend]:
    with NativeBackend.load("mini", EngineOptions(device="cpu", max_model_len=1024)) as backend:
        yield backend


def encoded(image: Image.Image, orientation: int = 1) -> ImagePart:
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = BytesIO()
    image.convert("RGB").save(buffer, "PNG", exif=exif)
    return ImagePart(buffer.getvalue())


# What undoes each turn, as EXIF numbers them: the picture is stored so that a viewer turns it upright.
STORED = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}


@pytest.mark.parametrize("orientation", [1, *STORED])
@pytest.mark.parametrize("scale", [1, 1.7])
def test_boxes_land_through_turns_and_sizes(mini: NativeBackend, orientation: int, scale: float) -> None:
    """The box is where the fox is, in pixels of the upright original."""
    with Image.open(EXAMPLES / "animals.png") as picture:
        upright = picture.convert("RGB")
    upright = upright.resize((round(upright.width * scale), round(upright.height * scale)))
    stored = upright.transpose(STORED[orientation]) if orientation in STORED else upright
    found = detect(mini, encoded(stored, orientation), "fox")
    assert (found.width, found.height) == upright.size
    [fox] = found.objects
    assert fox.label == "fox"
    truth = [round(edge * scale) for edge in FOX]
    assert overlap(fox.box, truth) > 0.75


def overlap(one: tuple[int, ...], other: list[int]) -> float:
    """Intersection over union."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    both = max(width, 0) * max(height, 0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return both / (sum(areas) - both)


def test_the_form_leaves_what_the_model_says_by_itself(mini: NativeBackend) -> None:
    """It answers in the form already: holding it to that changes no word."""
    picture = ImagePart((EXAMPLES / "number-25.png").read_bytes())
    free = mini.stream(single_turn(SCENE, picture), SamplingParams()).answer()
    assert scene(mini, picture).answer.text == free.text


def test_boxes_are_drawn_where_they_are(tmp_path: Path) -> None:
    picture = encoded(Image.new("RGB", (90, 60), "white"), orientation=6)
    thing = SceneObject("cup", (10, 40, 50, 80), (0, 0, 0, 0))
    image = draw_boxes(picture, [thing])
    assert image.size == (60, 90), "upright"
    corners = [image.getpixel(place) for place in ((10, 40), (49, 79), (10, 79), (49, 40))]
    assert set(corners) == {(0xE6, 0x9F, 0x00)}
    assert image.getpixel((30, 60)) == (255, 255, 255)
    save_drawing(image, tmp_path / "out.png", "in.png")
    with Image.open(tmp_path / "out.png") as saved:
        assert saved.size == (60, 90)


def test_a_drawing_that_cannot_be_written(tmp_path: Path) -> None:
    image = Image.new("RGB", (9, 9))
    source = tmp_path / "in.png"
    image.save(source)
    before = source.read_bytes()
    for path in (source, tmp_path / "out.txt", tmp_path / "nowhere" / "out.png"):
        with pytest.raises(UsageError, match=re.escape(str(path))):
            save_drawing(image, path, str(source))
    assert source.read_bytes() == before
