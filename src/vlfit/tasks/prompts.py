"""The words that tasks put to the model. mini is trained on these very sentences, so a change here is a
change of its training text.
"""

CAPTION_SHORT = "Describe this picture in one sentence."
CAPTION_LONG = "Describe this picture in detail."

# Qwen3-VL answers boxes as `bbox_2d` in thousandths of width and height, inside a ```json fence.
SCENE = (
    'Analyse this picture. Answer with JSON: {"summary": "one sentence", '
    '"objects": [{"label": "name", "bbox_2d": [x1, y1, x2, y2]}], "text": ["words seen"]}. '
    "Boxes are in thousandths of the picture's width and height."
)

# The sentence of Qwen3-VL's own examples of grounding; `{}` stands for one thing, or several with commas.
DETECT = (
    'Locate every instance that belongs to the following categories: "{}". '
    "Report bbox coordinates in JSON format."
)
