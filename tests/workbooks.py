"""Writes workbooks as Excel does, as far as tests need them: numbers with all digits, dates."""

from __future__ import annotations

import datetime
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
RELATIONS = "http://schemas.openxmlformats.org/package/2006/relationships"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
TYPES = "application/vnd.openxmlformats-officedocument.spreadsheetml"
STYLES = (
    f'<styleSheet xmlns="{MAIN}"><fonts><font/></fonts><fills><fill/></fills><borders><border/>'
    '</borders><cellXfs><xf numFmtId="0"/><xf numFmtId="22" applyNumberFormat="1"/>'
    '<xf numFmtId="21" applyNumberFormat="1"/></cellXfs></styleSheet>'
)
DAY = datetime.timedelta(days=1)


class Formula(NamedTuple):
    text: str
    value: float
    """What Excel has computed and stored"""


class Fault(NamedTuple):
    text: str


def write_workbook(
    path: Path,
    sheets: Mapping[str, Sequence[Sequence[Any]]],
    *,
    since_1904: bool = False,
    merged: Sequence[str] = (),
    hidden: Sequence[str] = (),
) -> Path:
    """Write sheets of rows; `merged` are ranges such as A1:B1 of every sheet."""
    epoch = datetime.datetime(1904, 1, 1) if since_1904 else datetime.datetime(1899, 12, 30)
    numbers = range(1, len(sheets) + 1)
    listed = "".join(
        f'<sheet name="{escape(name)}" sheetId="{i}" r:id="rId{i}"'
        f"{' state=' + chr(34) + 'hidden' + chr(34) if name in hidden else ''}/>"
        for i, name in zip(numbers, sheets, strict=True)
    )
    parts = {
        "[Content_Types].xml": "<Types xmlns="
        '"http://schemas.openxmlformats.org/package/2006/content-types">'
        '<Default Extension="rels" ContentType='
        '"application/vnd.openxmlformats-package.relationships+xml"/>'
        '<Default Extension="xml" ContentType="application/xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{TYPES}.sheet.main+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{RELATIONS}"><Relationship Id="rId1" '
        f'Type="{OFFICE}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{MAIN}" xmlns:r="{OFFICE}">'
        f'<workbookPr date1904="{int(since_1904)}"/><sheets>{listed}</sheets></workbook>',
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{RELATIONS}">'
        + "".join(
            f'<Relationship Id="rId{i}" Type="{OFFICE}/worksheet" '
            f'Target="worksheets/sheet{i}.xml"/>'
            for i in numbers
        )
        + f'<Relationship Id="rId99" Type="{OFFICE}/styles" Target="styles.xml"/></Relationships>',
        "xl/styles.xml": STYLES,
    }
    ranges = "".join(f'<mergeCell ref="{one}"/>' for one in merged)
    ranges = f"<mergeCells>{ranges}</mergeCells>" if merged else ""
    for i, rows in zip(numbers, sheets.values(), strict=True):
        cells = "".join(
            f'<row r="{r}">{"".join(_format(v, r, c, epoch) for c, v in enumerate(row))}</row>'
            for r, row in enumerate(rows, start=1)
        )
        parts[f"xl/worksheets/sheet{i}.xml"] = (
            f'<worksheet xmlns="{MAIN}"><sheetData>{cells}</sheetData>{ranges}</worksheet>'
        )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            archive.writestr(name, f'<?xml version="1.0" encoding="UTF-8"?>{text}')
    return path


def _format(value: Any, row: int, column: int, epoch: datetime.datetime) -> str:
    at = f'r="{chr(65 + column)}{row}"'
    match value:
        case None:
            return ""
        case bool():
            return f'<c {at} t="b"><v>{int(value)}</v></c>'
        case str():
            return f'<c {at} t="inlineStr"><is><t>{escape(value)}</t></is></c>'
        case datetime.datetime():
            return f'<c {at} s="1"><v>{(value - epoch) / DAY!r}</v></c>'
        case datetime.time():
            since = datetime.datetime.combine(datetime.date.min, value) - datetime.datetime.min
            return f'<c {at} s="2"><v>{since / DAY!r}</v></c>'
        case Formula():
            return f"<c {at}><f>{escape(value.text)}</f><v>{value.value!r}</v></c>"
        case Fault():
            return f'<c {at} t="e"><v>{value.text}</v></c>'
    return f"<c {at}><v>{float(value)!r}</v></c>"
