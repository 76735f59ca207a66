// A curve over the steps, on a logarithmic axis, with a mark at each skipped step.
const SPACE = "http://www.w3.org/2000/svg";
const LEFT = 56, RIGHT = 16, TOP = 12, BOTTOM = 22;

export class Chart {
  // `base`: of the logarithms, 2 or 10; `stairs`: each value holds until the next.
  constructor(svg, { base, stairs, lowest, highest }) {
    Object.assign(this, { svg, base, stairs, range: [lowest, highest] });
    this.clear();
    new ResizeObserver(() => this.draw()).observe(svg);
  }

  clear() {
    this.values = []; // of steps 1, 2, ...
    this.skipped = [];
    this.draw();
  }

  add(value, applied) {
    this.values.push(value);
    if (!applied) this.skipped.push(this.values.length);
  }

  draw() {
    const { width, height } = this.svg.getBoundingClientRect();
    if (!width) return;
    const powers = this.powers();
    const last = Math.max(100, this.values.length);
    const x = (step) => LEFT + ((width - LEFT - RIGHT) * step) / last;
    const y = (value) => {
      const share = (this.log(value) - powers[0]) / (powers.at(-1) - powers[0]);
      return height - BOTTOM - (height - TOP - BOTTOM) * share;
    };
    const parts = powers.map((power) => {
      const at = y(this.base ** power);
      return [line("grid", LEFT, at, width - RIGHT, at), text(LEFT - 8, at + 4, "end", count(this.base ** power))];
    });
    for (const step of steps(last, width)) parts.push(text(x(step), height - 4, "middle", count(step)));
    for (const step of this.skipped) {
      parts.push(line("skip", x(step), TOP, x(step), height - BOTTOM));
      const value = this.values[step - 1];
      const place = Number.isFinite(value) ? y(value) : TOP + 4;
      parts.push(element("circle", { cx: x(step), cy: place, r: 3.5 }));
    }
    parts.push(element("path", { class: "curve", d: this.path(x, y) }));
    this.svg.replaceChildren(...parts.flat());
  }

  log(value) {
    return Math.log(value) / Math.log(this.base);
  }

  // Powers of the base from below the smallest value to above the largest, seven lines at most.
  powers() {
    let [low, high] = this.range;
    for (const value of this.values) {
      if (!Number.isFinite(value) || value <= 0) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    const first = Math.floor(this.log(low) + 1e-9);
    const end = Math.ceil(this.log(high) - 1e-9);
    const stride = Math.max(1, Math.ceil((end - first) / 6));
    const count = Math.max(1, Math.ceil((end - first) / stride));
    return Array.from({ length: count + 1 }, (_, index) => first + index * stride);
  }

  path(x, y) {
    let path = "", drawn = false;
    this.values.forEach((value, index) => {
      if (!Number.isFinite(value)) {
        drawn = false;
        return;
      }
      const at = `${x(index + 1).toFixed(1)} ${y(value).toFixed(1)}`;
      if (drawn && this.stairs) path += `H${x(index + 1).toFixed(1)}`;
      path += `${drawn ? "L" : "M"}${at}`;
      drawn = true;
    });
    return path;
  }
}

function element(name, attributes) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function line(kind, x1, y1, x2, y2) {
  return element("line", { class: kind, x1, y1, x2, y2 });
}

function text(x, y, anchor, content) {
  const made = element("text", { x, y, "text-anchor": anchor });
  made.textContent = content;
  return made;
}

// A number in a few characters: 0.001, 4,096, or 2²⁰ for a large power of two.
export function count(value) {
  const exponent = Math.log2(value);
  if (exponent > 16 && Number.isInteger(exponent)) {
    return "2" + [...String(exponent)].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("");
  }
  return value >= 1 || value === 0 ? value.toLocaleString("en") : String(Number(value.toPrecision(3)));
}

// Round step numbers for the axis, one per 80 pixels at most.
function steps(last, width) {
  const rough = (last * 80) / width;
  const power = 10 ** Math.floor(Math.log10(rough));
  const stride = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  return Array.from({ length: Math.floor(last / stride) + 1 }, (_, index) => index * stride);
}
