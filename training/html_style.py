"""Looks and mouse of the page of a report: CSS and JavaScript as text, so that it is one file."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --pale: #6a6f76; --line: #d9dce1;
  --back: #fff; --card: #f7f8fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --pale: #9aa1aa; --line: #3a3f46;
  --back: #16181b; --card: #1f2226; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 1400px; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1rem 0 .25rem; } p { color: var(--pale); margin: .1rem 0 .6rem; }
.legend { position: sticky; top: 0; z-index: 2; background: var(--back); padding: .5rem 0;
  border-bottom: 1px solid var(--line); display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; }
.legend label { display: flex; align-items: center; gap: .4rem; cursor: pointer; }
.legend i { width: 1.4rem; height: .3rem; border-radius: 2px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
tbody th { font-weight: 500; white-space: nowrap; } thead th { color: var(--pale); }
.numbers td { font-variant-numeric: tabular-nums; white-space: nowrap; }
.numbers td:last-child { color: var(--pale); white-space: normal; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(380px, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption small { display: block; color: var(--pale); min-height: 2.6em; }
.chart { background: var(--card); border-radius: 8px; padding: .75rem; position: relative; }
.chart svg { width: 100%; height: auto; display: block; }
svg text { font-size: 11px; fill: var(--pale); } svg .grid { stroke: var(--line); }
svg polyline { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
svg .mouse { stroke: var(--pale); stroke-dasharray: 3 3; }
.tip { position: absolute; pointer-events: none; background: var(--back); padding: .3rem .5rem;
  border: 1px solid var(--line); border-radius: 6px; font-size: .8rem; white-space: nowrap;
  font-variant-numeric: tabular-nums; z-index: 1; }
.row { display: flex; gap: .75rem; overflow-x: auto; }
.row figure { flex: 0 0 300px; } .row img { width: 300px; }
.pictures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); }
img { max-width: 100%; border-radius: 4px; display: block; }
.pictures img { width: 100%; max-height: 280px; object-fit: contain; object-position: left;
  image-rendering: pixelated; }
figcaption { font-size: .85rem; color: var(--pale); } .chart figcaption b { color: var(--ink); }
.hidden { display: none; }
"""

SCRIPT = """
const names = [...document.querySelectorAll('.legend span')].map(each => each.textContent);
const colours = [...document.querySelectorAll('.legend i')].map(each => each.style.background);
const shown = names.map(() => true);
for (const box of document.querySelectorAll('.legend input')) {
  box.addEventListener('change', () => {
    const run = +box.dataset.run;
    shown[run] = box.checked;
    for (const each of document.querySelectorAll('.run-' + run))
      each.classList.toggle('hidden', !box.checked);
  });
}
function nearest(points, step) {
  let best = points[0];
  for (const point of points)
    if (Math.abs(point[0] - step) < Math.abs(best[0] - step)) best = point;
  return best;
}
for (const chart of document.querySelectorAll('.chart')) {
  const data = JSON.parse(chart.dataset.curves), svg = chart.querySelector('svg');
  const [low, high] = data.x, tip = document.createElement('div');
  tip.className = 'tip hidden';
  chart.append(tip);
  const line = document.createElementNS('http://www.w3.org/2000/svg', 'line');
  line.setAttribute('class', 'mouse hidden');
  line.setAttribute('y1', 10);
  line.setAttribute('y2', 220);
  svg.append(line);
  svg.addEventListener('mousemove', event => {
    const box = svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * 440 - 58) / 370;
    const step = low + Math.min(1, Math.max(0, share)) * (high - low);
    const seen = data.runs.filter(each => shown[each.run] && each.points.length);
    if (!seen.length) return;
    const at = nearest(seen[0].points, step)[0];
    tip.replaceChildren(Object.assign(document.createElement('div'), {textContent: 'step ' + at}));
    for (const each of seen) {
      const row = document.createElement('div');
      row.style.color = colours[each.run];
      row.textContent = names[each.run] + ': ' +
        Number(nearest(each.points, at)[1].toPrecision(5));
      tip.append(row);
    }
    const across = 58 + (high > low ? (at - low) / (high - low) : .5) * 370;
    line.setAttribute('x1', across);
    line.setAttribute('x2', across);
    const outer = chart.getBoundingClientRect();
    const left = box.left - outer.left + across / 440 * box.width;
    tip.style.top = (box.top - outer.top + 12) + 'px';
    tip.style.left = left < outer.width / 2 ? (left + 10) + 'px' : '';
    tip.style.right = left < outer.width / 2 ? '' : (outer.width - left + 10) + 'px';
    tip.classList.remove('hidden');
    line.classList.remove('hidden');
  });
  svg.addEventListener('mouseleave', () => {
    tip.classList.add('hidden');
    line.classList.add('hidden');
  });
}
"""
