"""The style of the page: light, and dark where the reader's system is."""

from __future__ import annotations

LIGHT = {
    "page": "#f7f7f5",
    "card": "#ffffff",
    "ink": "#1d1d1b",
    "soft": "#5f5e5a",
    "rule": "#e2e1dc",
    "warn": "#9a3412",
    "warnbg": "#fff4ec",
}
DARK = {
    "page": "#161615",
    "card": "#1f1f1d",
    "ink": "#ecebe6",
    "soft": "#a8a69e",
    "rule": "#383733",
    "warn": "#fdba74",
    "warnbg": "#33241a",
}
LINES = (("#2a78d6", "#3987e5"), ("#d9480f", "#f0803c"), ("#14866b", "#2bb392"), ("#7a4fc4", "#a78bea"), ("#a07400", "#d9a520"))
"""(light, dark) colour of a chart's first, second, ... line."""


def sheet() -> str:
    """The style sheet, without a character that XML would want escaped."""
    light = {**LIGHT, **{f"s{number}": pair[0] for number, pair in enumerate(LINES)}}
    dark = {**DARK, **{f"s{number}": pair[1] for number, pair in enumerate(LINES)}}
    rules = [f":root{{color-scheme:light dark;{_variables(light)}}}", f"@media (prefers-color-scheme:dark){{:root{{{_variables(dark)}}}}}"]
    for number in range(len(LINES)):
        colour = f"var(--s{number})"
        rules.append(f".l{number}{{stroke:{colour}}}.d{number}{{fill:{colour}}}.b{number}{{background:{colour}}}")
    return "\n".join([*rules, _FIXED])


def _variables(values: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in values.items())


_FIXED = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1220px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:24px;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:17px;margin:34px 0 10px}
p{margin:6px 0;color:var(--soft)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px;margin:18px 0}
.tile,figure,.box{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px 14px;margin:0}
.tile b{display:block;font-size:18px;font-weight:600;overflow-wrap:anywhere}
.tile span{color:var(--soft);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:14px}
figcaption{font-weight:600}
.keys{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;color:var(--soft);min-height:21px}
.key i{display:inline-block;width:12px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle}
.key b{color:var(--ink);font-weight:600}
svg{display:block;width:100%;height:auto;margin-top:4px}
svg text{font-size:11.5px;fill:var(--soft)}
text.y{text-anchor:end}
text.x{text-anchor:middle}
.grid{stroke:var(--rule);stroke-width:1}
polyline{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.warnings{background:var(--warnbg);border-color:var(--warn)}
.warnings li{color:var(--warn);overflow-wrap:anywhere}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:4px 14px 4px 0;border-bottom:1px solid var(--rule);vertical-align:top;overflow-wrap:anywhere}
th{font-weight:600}
td.n,th.n{text-align:right;white-space:nowrap}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:14px}
.facts table{width:100%}
.facts td:first-child{color:var(--soft);width:42%}
.wide{overflow-x:auto}
details{margin-top:12px}
details .charts{margin-top:10px}
summary{cursor:pointer;font-weight:600}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:6px 0;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
"""
