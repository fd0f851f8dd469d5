"""The page's style sheet: light and dark, phone and desk, screen and paper."""

from __future__ import annotations

LIGHT = """
--page:#f6f7f9;--card:#fff;--text:#1b2330;--soft:#5a6575;--edge:#dde2e9;--grid:#e8ebf0;--focus:#1f5fd6;
--compute:#9aa7b8;--wait:#d64550;--encode:#e3a008;--wire:#2f6fd8;--decode:#159a86;
--go:#12805c;--stay:#8a5a00;--go-bg:#e5f5ee;--stay-bg:#fdf3e0;--mark:#eef4ff;
--h0:#2f6fd8;--h1:#e07b00;--h2:#12956f;--h3:#c2317a;--h4:#7a52d1;--h5:#a07a00;--h6:#0e8fa8;--h7:#b0553a;
"""
DARK = """
--page:#0f141b;--card:#181f29;--text:#e6ebf2;--soft:#9aa6b6;--edge:#2b3543;--grid:#27303c;--focus:#7fb0ff;
--compute:#66758a;--wait:#f0717a;--encode:#f0b93a;--wire:#6ea4ff;--decode:#3cc7b0;
--go:#5fd6a6;--stay:#f2c063;--go-bg:#12291f;--stay-bg:#2b2313;--mark:#1d2a40;
--h0:#6ea4ff;--h1:#ff9f45;--h2:#3ecf9f;--h3:#ff7ab8;--h4:#b394ff;--h5:#dcbb3f;--h6:#4fd0e6;--h7:#e8937a;
"""
BASE = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--text);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main,footer{max-width:1120px;margin:0 auto;padding:20px 16px}
h1{font-size:clamp(1.6rem,5vw,2.3rem);line-height:1.15;margin:.3em 0;letter-spacing:-.02em}
h2{font-size:1.1rem;margin:0 0 .3em}
p{margin:.3em 0 .8em;overflow-wrap:anywhere}
.lead,.hint,footer{color:var(--soft)}
.lead{max-width:75ch}
.hint,footer{font-size:.86rem}
.columns{display:grid;grid-template-columns:minmax(0,1fr);gap:16px;margin-bottom:16px}
.column{display:grid;gap:16px;align-content:start;min-width:0}
.card{background:var(--card);border:1px solid var(--edge);border-radius:12px;padding:16px;min-width:0}
.verdict{border-left:6px solid var(--stay);background:var(--stay-bg)}
.verdict.go{border-left-color:var(--go);background:var(--go-bg)}
.verdict h2{font-size:1.5rem;color:var(--stay)}
.verdict.go h2{color:var(--go)}
.eyebrow{margin:0;font-size:.8rem;color:var(--soft)}
pre{overflow-x:auto;background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:10px 12px;margin:0}
code{font:.85rem/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.choice{border:0;padding:0;margin:0 0 16px;display:flex;flex-wrap:wrap;gap:8px}
.choice legend{font-size:.8rem;color:var(--soft);padding:0;margin-bottom:4px}
.choice label{display:inline-flex;position:relative;cursor:pointer}
.choice input{position:absolute;opacity:0;inset:0;margin:0;cursor:pointer}
.choice span{border:1px solid var(--edge);border-radius:999px;padding:5px 14px;background:var(--card);font-size:.9rem}
.choice input:checked+span{background:var(--text);color:var(--page);border-color:var(--text)}
:focus-visible,.choice input:focus-visible+span{outline:3px solid var(--focus);outline-offset:2px;border-radius:8px}
.skip{position:absolute;left:-999px}
.skip:focus{left:12px;top:8px;background:var(--card);padding:8px 12px;z-index:1;color:var(--focus)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 14px;padding:0;margin:0 0 10px;font-size:.82rem}
.legend i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
details{margin-top:8px;font-size:.86rem}
details ul{padding-left:1.2em;margin:.4em 0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);padding:4px 8px;font-size:.86rem}
th,td{padding:7px 8px;text-align:right;border-bottom:1px solid var(--edge);white-space:nowrap}
th:first-child{text-align:left;position:sticky;left:0;background:var(--card)}
thead th{color:var(--soft);font-weight:600}
tbody th{font-weight:600}
tr.chosen td,tr.chosen th:first-child{background:var(--mark)}
.chart{display:block;width:100%;height:auto;overflow:visible}
.chart text{font:14px system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--text)}
.chart .tick{fill:var(--soft)}
.chart .strong{font-weight:600}
.chart .halo{paint-order:stroke;stroke:var(--card);stroke-width:3px;stroke-linejoin:round}
.grid{stroke:var(--grid)}.axis{stroke:var(--soft)}.even{stroke:var(--text);stroke-width:1.2}
.whisker{stroke:var(--text);stroke-width:1.2}
.line,.lead,.limit{fill:none;stroke-linejoin:round}
.line{stroke:var(--c);stroke-width:2}.thin{stroke-width:1.5}.chart .lead{stroke:var(--c);stroke-width:1.2}
.dashed{stroke-dasharray:5 3}
.dot{fill:var(--c);stroke:var(--card);stroke-width:1}.ring{fill:none;stroke:var(--text);stroke-width:1.5;pointer-events:all}
.limit{stroke:var(--soft);stroke-width:1.5;stroke-dasharray:6 4}.cross{stroke:var(--soft);stroke-width:1.4}
.hit{fill:transparent}
.hook-exact{--c:var(--text)}.hook-noop{--c:var(--soft);stroke-dasharray:2 3}
@media (min-width:481px){.chart text{font-size:12.5px}}
@media (max-width:480px){main,footer{padding:14px 10px}.card{padding:12px}}
@media (min-width:900px){
.columns{grid-template-columns:repeat(2,minmax(0,1fr))}
.chart text{font-size:10.5px}
main,footer{padding:28px 24px}
}
@media print{.choice,.skip{display:none}.card{break-inside:avoid}}
"""
PARTS = ("compute", "wait", "encode", "wire", "decode")


def style(groups: int) -> str:
    """For a page with so many groups to choose from."""
    colours = "".join(f".c-{part}{{fill:var(--{part})}}.b-{part}{{background:var(--{part})}}" for part in PARTS)
    hooks = "".join(f".h{place}{{--c:var(--h{place})}}" for place in range(8))
    shown = "".join(_only(index) for index in range(groups)) if groups > 1 else ""
    dark = f"@media (prefers-color-scheme:dark){{:root{{{DARK}}}}}"
    return f":root{{color-scheme:light dark;{LIGHT}}}{dark}{BASE}{colours}{hooks}@media screen{{{shown}}}"


def _only(index: int) -> str:
    """While a button is chosen, what belongs to the others is away. On paper everything is there."""
    return f"body:has(#choose-{index}:checked) .group:not(.group-{index}){{display:none}}"
