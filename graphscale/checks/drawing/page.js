"use strict";
(() => {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const svg = document.getElementById("drawing");
  const view = document.getElementById("view");
  const main = document.querySelector("main");
  const tip = document.getElementById("tip");
  const pinnedCard = document.getElementById("pinned");
  const boxes = facts.map((_, i) => document.getElementById(`box-${i}`));
  const links = [...document.querySelectorAll(".link")].map((path) => ({
    path, from: Number(path.dataset.from), to: Number(path.dataset.to),
  }));
  const linksOf = facts.map(() => []);
  for (const link of links) {
    linksOf[link.from].push(link);
    linksOf[link.to].push(link);
  }

  // The browser's own tooltips would cover ours; their text stays as the label.
  for (const title of svg.querySelectorAll("title")) title.remove();

  // --- text, never markup: names come from files ---

  const make = (tag, text, className) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  };

  const jump = (text, box) => {
    const button = make("button", text, "jump");
    button.type = "button";
    button.dataset.jump = box;
    return button;
  };

  const valueRow = (label, [name, type, degree, box, origin], pinned) => {
    const row = make("tr");
    row.append(make("th", label));
    const cell = make("td");
    cell.append(pinned && box !== null ? jump(name, box) : make("span", name));
    cell.append(make("div", origin ? `${type}, ${origin}` : type, "name"));
    row.append(cell);
    const text = degree === "" || degree === "0" ? "" : degree === "1" ? "× S" : degree === "any" ? "zeros" : `degree ${degree}`;
    row.append(make("td", text, degree === "1" ? "degree-1" : ""));
    return row;
  };

  const describe = (i, pinned) => {
    const fact = facts[i];
    const root = make("div", undefined, "facts");
    root.append(make("b", fact.op || fact.title));
    if (fact.name && fact.name !== fact.title) root.append(make("div", fact.name, "name"));
    const tags = [fact.in && !fact.out ? "output" : fact.phase, fact.pass === "added" ? "added" : fact.pass && `inserted by ${fact.pass}`, ...(fact.notes || [])];
    for (const tag of tags) if (tag) root.append(make("span", tag, "tag"));
    const table = make("table");
    for (const [name, value] of fact.attributes || []) {
      const row = make("tr");
      row.append(make("th", name), make("td", value));
      table.append(row);
    }
    const most = pinned ? Infinity : 8;
    for (const [side, label] of [["in", "in"], ["out", "out"]]) {
      const values = fact[side] || [];
      values.slice(0, most).forEach((value) => table.append(valueRow(label, value, pinned)));
      if (values.length > most) {
        const row = make("tr");
        row.append(make("th", ""), make("td", `and ${values.length - most} more`));
        table.append(row);
      }
    }
    if (table.rows.length) root.append(table);
    if (fact.ops) {
      const inside = make("table");
      for (const [op, count] of fact.ops.slice(0, pinned ? Infinity : 10)) {
        const row = make("tr");
        row.append(make("td", op), make("td", String(count), "number"));
        inside.append(row);
      }
      root.append(inside);
    }
    if (pinned && fact.names) {
      const list = make("details");
      list.append(make("summary", "Their names"));
      list.append(make("div", fact.names.join(", "), "name"));
      root.append(list);
    }
    return root;
  };

  // --- zoom and pan ---

  const corner = svg.viewBox.baseVal;
  const whole = { x: corner.x, y: corner.y, width: corner.width, height: corner.height };
  svg.removeAttribute("viewBox");
  let scale = 1, left = 0, top = 0;
  const show = () => view.setAttribute("transform", `translate(${left} ${top}) scale(${scale})`);
  const zoom = (factor, x, y) => {
    const next = Math.min(4, Math.max(0.04, scale * factor));
    left = x - ((x - left) * next) / scale;
    top = y - ((y - top) * next) / scale;
    scale = next;
    show();
  };
  const centre = () => [main.clientWidth / 2, main.clientHeight / 2];
  const fit = () => {
    scale = Math.min(1.25, main.clientWidth / whole.width, main.clientHeight / whole.height);
    left = (main.clientWidth - whole.width * scale) / 2 - whole.x * scale;
    top = (main.clientHeight - whole.height * scale) / 2 - whole.y * scale;
    show();
  };
  const middle = (i) => {
    const body = boxes[i].querySelector(".body");
    const place = boxes[i].transform.baseVal.getItem(0).matrix;
    return [place.e + body.width.baseVal.value / 2, place.f + body.height.baseVal.value / 2];
  };
  // The nearest offset that leaves no empty side beside a long drawing, and that centres a short one.
  const fill = (offset, begin, size, room) => {
    const first = 40 - begin * scale, last = room - 40 - (begin + size) * scale;
    return last < first ? Math.min(Math.max(offset, last), first) : (first + last) / 2;
  };
  const look = (i, least) => {
    const [x, y] = middle(i), [w, h] = centre();
    scale = Math.max(scale, least);
    left = fill(w - x * scale, whole.x, whole.width, main.clientWidth);
    top = fill(h - y * scale, whole.y, whole.height, main.clientHeight);
    show();
  };
  // All of the drawing where it can be read; else the place where the scale enters, or the first new node.
  const start = () => {
    fit();
    if (scale >= 0.5) return;
    const seeds = [".pass-scale-loss", ":has(.badge.enters)", ":not(.pass-none)", ".box"];
    const first = seeds.map((kind) => boxes.findIndex((box) => box.matches(kind))).find((i) => i >= 0);
    if (first !== undefined) look(first, 0.75);
  };
  const isSeen = (i) => {
    const [x, y] = middle(i);
    const [px, py] = [left + x * scale, top + y * scale];
    return px > 60 && py > 40 && px < main.clientWidth - 60 && py < main.clientHeight - 40 && scale > 0.3;
  };

  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const area = main.getBoundingClientRect();
    const step = event.deltaMode === 1 ? 24 * event.deltaY : event.deltaY;
    zoom(Math.exp(-step * (event.ctrlKey ? 0.01 : 0.0016)), event.clientX - area.left, event.clientY - area.top);
  }, { passive: false });

  const pointers = new Map();
  let moved = 0;
  svg.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event);
    if (pointers.size === 1) moved = 0;
  });
  window.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return;
    const [x, y] = [event.clientX - before.clientX, event.clientY - before.clientY];
    moved += Math.abs(x) + Math.abs(y);
    if (pointers.size === 2) {
      const other = [...pointers.values()].find((p) => p.pointerId !== event.pointerId);
      const span = (p) => Math.hypot(p.clientX - other.clientX, p.clientY - other.clientY) || 1;
      const area = main.getBoundingClientRect();
      zoom(span(event) / span(before), other.clientX - area.left, other.clientY - area.top);
    } else if (moved > 4) {
      svg.classList.add("dragging");
      hideTip();
      left += x;
      top += y;
      show();
    }
    pointers.set(event.pointerId, event);
  });
  for (const end of ["pointerup", "pointercancel"]) {
    window.addEventListener(end, (event) => {
      pointers.delete(event.pointerId);
      svg.classList.remove("dragging");
    });
  }
  document.getElementById("in").addEventListener("click", () => zoom(1.3, ...centre()));
  document.getElementById("out").addEventListener("click", () => zoom(1 / 1.3, ...centre()));
  document.getElementById("fit").addEventListener("click", fit);
  // --- hover and pin ---

  let pinned = null;
  const near = (i) => {
    for (const element of svg.querySelectorAll(".near")) element.classList.remove("near");
    svg.classList.toggle("focus", i !== null);
    svg.classList.toggle("pinned", pinned !== null);
    if (i === null) return;
    boxes[i].classList.add("near");
    for (const link of linksOf[i]) {
      for (const element of [link.path, boxes[link.from], boxes[link.to]]) element.classList.add("near");
    }
  };
  const hideTip = () => { tip.hidden = true; };
  const showTip = (i) => {
    tip.replaceChildren(describe(i, false));
    tip.hidden = false;
    const area = main.getBoundingClientRect();
    const box = boxes[i].querySelector(".body").getBoundingClientRect();
    const [w, h] = [tip.offsetWidth, tip.offsetHeight];
    const right = box.right - area.left + 14;
    const x = right + w > main.clientWidth ? box.left - area.left - w - 14 : right;
    tip.style.left = `${Math.max(8, x)}px`;
    tip.style.top = `${Math.max(8, Math.min(box.top - area.top - 8, main.clientHeight - h - 8))}px`;
  };
  const boxAt = (event) => {
    const box = event.target.closest && event.target.closest(".box");
    return box ? Number(box.dataset.box) : null;
  };
  const pin = (i) => {
    if (pinned !== null) {
      boxes[pinned].classList.remove("pinned");
      boxes[pinned].setAttribute("aria-pressed", "false");
    }
    pinned = i;
    near(i);
    pinnedCard.hidden = i === null;
    if (i === null) return;
    boxes[i].classList.add("pinned");
    boxes[i].setAttribute("aria-pressed", "true");
    pinnedCard.querySelector("div").replaceChildren(describe(i, true));
  };
  const visit = (i) => {
    pin(i);
    look(i, 0.85);
    hideTip();
  };
  svg.addEventListener("pointerover", (event) => {
    const i = boxAt(event);
    if (i === null || pointers.size) return;
    showTip(i);
    if (pinned === null) near(i);
  });
  svg.addEventListener("pointerout", (event) => {
    if (boxAt(event) === null) return;
    hideTip();
    if (pinned === null) near(null);
  });
  svg.addEventListener("click", (event) => {
    if (moved > 4) return;
    const i = boxAt(event);
    pin(i === pinned ? null : i);
    if (i === null) document.activeElement.blur();
  });
  svg.addEventListener("focusin", (event) => {
    const i = boxAt(event);
    if (i === null || !boxes[i].matches(":focus-visible")) return;
    if (!isSeen(i)) look(i, 0.85);
    showTip(i);
    if (pinned === null) near(i);
  });
  svg.addEventListener("focusout", () => {
    hideTip();
    if (pinned === null) near(null);
  });
  svg.addEventListener("keydown", (event) => {
    const i = boxAt(event);
    if (i === null) return;
    const before = linksOf[i].filter((link) => link.to === i).map((link) => link.from);
    const after = linksOf[i].filter((link) => link.from === i).map((link) => link.to);
    const next = { ArrowLeft: before[0], ArrowUp: before[0], ArrowRight: after[0], ArrowDown: after[0] }[event.key];
    if (event.key === "Enter" || event.key === " ") pin(i === pinned ? null : i);
    else if (next !== undefined) boxes[next].focus();
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      pin(null);
      hideTip();
      filter(null);
    }
    if (event.target.tagName === "INPUT" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "+" || event.key === "=") zoom(1.3, ...centre());
    if (event.key === "-") zoom(1 / 1.3, ...centre());
    if (event.key === "0") fit();
    if (event.key === "/") {
      search.focus();
      event.preventDefault();
    }
  });
  document.getElementById("unpin").addEventListener("click", () => pin(null));
  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest("[data-jump]");
    if (button) visit(Number(button.dataset.jump));
  });

  // --- long tables: the rest of their rows ---

  const rest = JSON.parse(document.getElementById("rows").textContent);
  const rowOf = (cells) => {
    const row = make("tr");
    for (const cell of cells) {
      const isJump = Array.isArray(cell);
      const data = make("td", isJump ? undefined : String(cell), typeof cell === "number" ? "number" : "");
      if (isJump) data.append(jump(...cell));
      row.append(data);
    }
    return row;
  };
  for (const button of document.querySelectorAll(".more")) {
    button.addEventListener("click", () => {
      button.previousElementSibling.tBodies[0].append(...rest[Number(button.dataset.rest)].map(rowOf));
      button.remove();
    });
  }

  // --- legend: show one kind only ---

  const legend = [...document.querySelectorAll(".legend button")];
  const filter = (chosen) => {
    for (const button of legend) button.setAttribute("aria-pressed", String(button === chosen));
    for (const element of svg.querySelectorAll(".match")) element.classList.remove("match");
    svg.classList.toggle("filter", chosen !== null);
    if (chosen === null) return;
    const matches = new Set(facts.keys());
    for (const i of facts.keys()) if (!boxes[i].matches(chosen.dataset.select)) matches.delete(i);
    for (const i of matches) boxes[i].classList.add("match");
    for (const link of links) {
      const isMatch = chosen.dataset.links ? link.path.matches(chosen.dataset.links) : matches.has(link.from) && matches.has(link.to);
      if (isMatch) link.path.classList.add("match");
    }
  };
  for (const button of legend) {
    button.addEventListener("click", () => filter(button.getAttribute("aria-pressed") === "true" ? null : button));
  }

  // --- search ---

  const search = document.getElementById("search");
  const results = document.getElementById("results");
  const entries = [];
  facts.forEach((fact, i) => {
    entries.push([fact.name || fact.title, fact.op || fact.title, i]);
    for (const name of fact.names || []) entries.push([name, "folded", i]);
    for (const value of fact.out || []) if (value[0]) entries.push([value[0], `output of ${fact.name}`, i]);
  });
  let found = [], selected = 0;
  const list = () => {
    const words = search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    found = words.length
      ? entries.filter(([name, kind]) => words.every((word) => `${name} ${kind}`.toLowerCase().includes(word))).slice(0, 40)
      : [];
    selected = 0;
    draw();
  };
  const draw = () => {
    results.replaceChildren(...found.map(([name, kind], n) => {
      const item = make("li", name);
      item.id = `result-${n}`;
      item.setAttribute("role", "option");
      item.setAttribute("aria-selected", String(n === selected));
      item.append(" ", make("small", kind));
      item.addEventListener("pointerdown", (event) => { event.preventDefault(); choose(n); });
      return item;
    }));
    if (!found.length && search.value.trim()) results.append(make("li", "nothing of this name"));
    results.hidden = !search.value.trim();
    search.setAttribute("aria-expanded", String(!results.hidden));
    if (found.length) search.setAttribute("aria-activedescendant", `result-${selected}`);
    else search.removeAttribute("aria-activedescendant");
  };
  const choose = (n) => {
    if (!found[n]) return;
    visit(found[n][2]);
    results.hidden = true;
    search.setAttribute("aria-expanded", "false");
  };
  search.addEventListener("input", list);
  search.addEventListener("focus", () => { if (search.value) list(); });
  search.addEventListener("blur", () => { results.hidden = true; });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") choose(selected);
    else if (event.key === "ArrowDown") selected = Math.min(selected + 1, found.length - 1);
    else if (event.key === "ArrowUp") selected = Math.max(selected - 1, 0);
    else return;
    if (event.key !== "Enter") draw();
    event.preventDefault();
  });

  start();
  // A link to one box: page.html#box-12.
  const named = /^#box-(\d+)$/.exec(location.hash);
  if (named && boxes[named[1]]) visit(Number(named[1]));
})();
