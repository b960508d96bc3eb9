"""The page's style sheet: light, dark and print, for phones and wide screens, without fonts or images."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --raised: #f6f7f9; --text: #1a1d21; --soft: #5a626c; --rule: #dfe3e8; --grid: #eceff2;
  --first: #2263a8; --second: #c4560a; --third: #8b95a1; --good: #1b7a43; --wait: #9a6200;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --raised: #1c2024; --text: #e6e9ec; --soft: #9aa4af; --rule: #31373d; --grid: #262b30;
    --first: #6fb1f2; --second: #f2994a; --third: #7c8792; --good: #5ecb8b; --wait: #e3b341;
  }
}
@media screen and (prefers-color-scheme: dark) {
  /* The figures of matplotlib are drawn for white, without a ground: light becomes dark, and hues stay. */
  .map img { filter: invert(0.9) hue-rotate(180deg); }
}
@media print {
  :root {
    color-scheme: light;
    --page: #ffffff; --raised: #ffffff; --text: #000000; --soft: #444444; --rule: #bbbbbb; --grid: #e4e4e4;
    --first: #2263a8; --second: #c4560a; --third: #8b95a1; --good: #1b7a43; --wait: #9a6200;
  }
  @page { margin: 14mm; }
  /* `main` outranks the rules for a screen, which come later. */
  body main { padding: 0; max-width: none; font-size: 9.5pt; }
  main h2 { margin-top: 26px; break-after: avoid; }
  main figure, main tr, main .figure, main .group { break-inside: avoid; }
  main .charts, main .maps { grid-template-columns: 1fr 1fr; }
  main .chart text { font-size: 14px; }
  main figcaption { font-size: 9pt; }
  main .map.wide img { max-width: 100%; }
  main .groups { columns: 2; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; overflow-wrap: anywhere; }
h1 { font-size: 30px; line-height: 1.15; letter-spacing: -0.015em; margin: 0; }
h2 {
  font-size: 18px; letter-spacing: -0.005em; margin: 48px 0 14px; padding-top: 12px;
  border-top: 1px solid var(--text);
}
h3 { font-size: 14px; margin: 26px 0 8px; }
p { margin: 0 0 10px; max-width: 78ch; }
a { color: var(--first); }
.contents { columns: 2 260px; column-gap: 36px; margin: 24px 0 0; padding-left: 20px; }
code, .mono {
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace;
  font-size: 0.86em;
}
.soft, .note, .unit { color: var(--soft); }
.note { font-size: 12.5px; margin: 2px 0 0; }

header { display: flex; flex-wrap: wrap; gap: 20px 48px; justify-content: space-between; align-items: flex-end; }
header > div { min-width: 0; }
header .what { flex: 1 1 420px; }
header .what p { margin: 8px 0 0; }
.kicker { font-size: 12.5px; letter-spacing: 0.08em; text-transform: uppercase; color: var(--soft); margin: 0 0 6px; }
.status {
  display: inline-block; font-size: 12.5px; font-weight: 600; padding: 1px 9px; margin-right: 8px;
  border: 1px solid currentColor; border-radius: 99px; color: var(--wait);
}
.status.over { color: var(--good); }
.bleu { flex: 0 1 380px; }
.bleu .value { font-size: 52px; line-height: 1; font-weight: 650; letter-spacing: -0.03em; }
.bleu .value small { font-size: 17px; font-weight: 500; letter-spacing: 0; color: var(--soft); }
.bleu p { margin: 6px 0 0; font-size: 12.5px; color: var(--soft); }
.warning { border-left: 3px solid var(--wait); background: var(--raised); padding: 8px 14px; margin: 18px 0 0; }

.figures {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 158px), 1fr)); margin: 0;
  gap: 1px; border: 1px solid transparent;
}
.figure { outline: 1px solid var(--rule); padding: 11px 14px 12px; min-width: 0; }
.figure dt { font-size: 12.5px; color: var(--soft); }
.figure dd { margin: 0; }
.figure .value { font-size: 20px; line-height: 1.35; font-weight: 600; letter-spacing: -0.01em; }
.figure .value, td, .chart text { font-variant-numeric: tabular-nums; }

.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 30px 36px; }
figure { margin: 0; min-width: 0; }
figcaption { font-size: 14px; margin-bottom: 6px; }
section > .map figcaption { max-width: 78ch; }
figcaption .unit { margin-left: 8px; font-size: 12.5px; }
.chart > svg { display: block; width: 100%; height: auto; overflow: visible; }
.chart text { font-size: 11.5px; fill: var(--soft); }
.chart text.left { text-anchor: end; }
.chart text.right { text-anchor: start; }
.chart text.below { text-anchor: middle; }
.chart line.grid { stroke: var(--grid); }
.chart line.axis { stroke: var(--soft); }
.chart .line { fill: none; stroke-width: 1.7; stroke-linejoin: round; }
.chart .line.third { stroke-width: 1.2; }
.chart .ring { fill: none; stroke: var(--text); stroke-width: 1.4; }
.line.first { stroke: var(--first); } .line.second { stroke: var(--second); } .line.third { stroke: var(--third); }
.dot.first, .band.first { fill: var(--first); }
.dot.second, .band.second { fill: var(--second); }
.dot.third, .band.third { fill: var(--third); }
.band { opacity: 0.22; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 12.5px; color: var(--soft); }
.swatch { display: inline-block; width: 18px; border-top: 3px solid; margin-right: 6px; vertical-align: 4px; }
.swatch.first { color: var(--first); } .swatch.second { color: var(--second); } .swatch.third { color: var(--third); }

table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-size: 12.5px; font-weight: 600; color: var(--soft); }
th, td { padding: 7px 16px 7px 0; vertical-align: top; border-bottom: 1px solid var(--rule); }
th:last-child, td:last-child { padding-right: 0; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.name { min-width: 13ch; }
.texts { table-layout: fixed; }
.texts td { white-space: pre-wrap; }
.texts .step { width: 72px; }

.maps { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr)); gap: 26px 36px; }
.map.wide { grid-column: 1 / -1; }
.map .scroll { overflow-x: auto; border: 1px solid var(--rule); padding: 8px; }
.map img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
.map.wide img { max-width: none; }

.groups { columns: 2 400px; column-gap: 36px; }
.group { margin: 0 0 24px; break-inside: avoid; }
.group h3 { margin-top: 0; }
.group td, .group th { padding-top: 3px; padding-bottom: 3px; font-size: 13px; font-weight: 400; color: var(--soft); }
.group th { width: 46%; }
.group tr.changed th, .group tr.changed td { color: var(--text); font-weight: 600; }
.group td .was { display: block; font-weight: 400; font-size: 12px; color: var(--soft); }
footer { margin-top: 48px; padding-top: 10px; border-top: 1px solid var(--rule); }
footer { font-size: 12.5px; color: var(--soft); }

@media (max-width: 640px) {
  main { padding: 24px 16px 40px; }
  h1 { font-size: 25px; }
  .figures { grid-template-columns: 1fr 1fr; }
  .figure { padding: 9px 11px; }
  .chart text { font-size: 13.5px; }
  .texts .step { width: 54px; padding-right: 10px; }
  .map img { max-width: none; }
  .map:not(.wide) img { width: 560px; }
  /* A row becomes a paragraph of labelled lines. */
  .stacks thead { display: none; }
  .stacks tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--rule); }
  .stacks td { display: block; width: auto !important; padding: 2px 0; border: 0; text-align: left !important; }
  .stacks td::before { content: attr(data-label); display: block; font-size: 12px; color: var(--soft); }
}
"""
