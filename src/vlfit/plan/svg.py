"""A plan's ledger as an SVG picture: one stacked bar and its lines."""

from html import escape

from vlfit.plan.ledger import shown_name
from vlfit.plan.plans import Plan
from vlfit.units import MIB

# Distinguishable with red-green colour blindness (after Okabe and Ito).
COLOURS = {
    "desktop": "#999999",
    "context": "#666666",
    "peers": "#a6761d",
    "weights.text": "#0072b2",
    "weights.vision": "#56b4e9",
    "weights.embedding": "#004b76",
    "weights.draft": "#08306b",
    "weights.offload": "#9ecae1",
    "kv_cache": "#e69f00",
    "state_cache": "#b35806",
    "state_snapshots": "#fdb863",
    "snapshots_in_ram": "#fee0b6",
    "vision_workspace": "#009e73",
    "text_workspace": "#66c2a5",
    "image_decoders": "#8c6bb1",
    "graphs": "#cc79a7",
    "growth": "#d55e00",
    "reserve": "#f0e442",
}
LETTERS = {  # of a bar without colours
    "desktop": "d",
    "context": "c",
    "peers": "p",
    "weights.text": "T",
    "weights.vision": "V",
    "weights.embedding": "E",
    "weights.draft": "D",
    "weights.offload": "o",
    "kv_cache": "k",
    "state_cache": "s",
    "state_snapshots": "S",
    "snapshots_in_ram": "R",
    "vision_workspace": "v",
    "text_workspace": "t",
    "image_decoders": "i",
    "graphs": "g",
    "growth": "G",
    "reserve": "r",
}
_FREE, _OVER = "#ffffff", "#d55e00"
_WIDTH, _LEFT, _BAR, _ROW = 760, 20, 36, 22


def draw_ledger(plan: Plan) -> str:
    """The plan's ledger as an SVG document. A red line marks the size of the card.

    A plan that does not fit is drawn beyond that line. Lines of 0 bytes are left out.
    """
    whole = max(plan.total, plan.gpu.total)
    scale = (_WIDTH - 2 * _LEFT) / whole
    lines = [line for line in plan.ledger if line.bytes]
    height = 96 + _ROW * (len(lines) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(_LEFT, 24, _title(plan)),
    ]
    at = float(_LEFT)
    for line in lines:
        width = line.bytes * scale
        parts.append(_box(at, 36, width, _BAR, COLOURS[line.line]))
        at += width
    if plan.headroom > 0:
        parts.append(_box(at, 36, plan.headroom * scale, _BAR, _FREE))
    edge = _LEFT + plan.gpu.total * scale
    parts.append(f'<path d="M{edge:.1f} 30V78" stroke="{_OVER}" stroke-width="2"/>')
    y = 96
    for line in lines:
        parts += [
            _box(_LEFT, y - 11, 12, 12, COLOURS[line.line]),
            _text(_LEFT + 20, y, shown_name(line.line)),
        ]
        parts += [_text(260, y, f"{line.bytes / MIB:,.0f} MiB", "end"), _text(276, y, line.how)]
        y += _ROW
    parts += [_text(_LEFT + 20, y, _verdict(plan)), "</svg>", ""]
    return "\n".join(parts)


def _title(plan: Plan) -> str:
    settings = plan.settings
    pictures = f", {settings.image_tokens} image tokens" if settings.image_tokens else ""
    return f"{plan.model.name} on {plan.gpu.name}: context {settings.context}{pictures}"


def _verdict(plan: Plan) -> str:
    total = f"{plan.total / MIB:,.0f} of {plan.gpu.total / MIB:,.0f} MiB"
    if plan.fits:
        return f"fits: {total}, {plan.headroom / MIB:,.0f} MiB left"
    return f"does not fit: {total}, {-plan.headroom / MIB:,.0f} MiB too much"


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height}" fill="{colour}" '
        'stroke="#333333" stroke-width="0.5"/>'
    )


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    # XML has no place for control characters, which the name of a folder may hold.
    shown = escape("".join(sign if sign.isprintable() else "?" for sign in words))
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{shown}</text>'
