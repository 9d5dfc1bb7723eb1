// Runs in a page that docs/site/check.py has opened: returns sentences on what a reader cannot see or read.
const [dark, done] = arguments;
const SLACK = 1.5; // pixels by which boxes may be off, because of rounding
const SMALLEST = 9; // pixels that the font of a picture has at least
const BLANK = 0.8; // luminance from which a box counts as white
const MOST = 6; // sentences of one kind for each page
const THEME = ".md-header, .md-search, .md-sidebar, .md-tabs, .md-dialog, .md-skip, .md-overlay, .md-top";
const PARTS = "defs, clipPath, mask, symbol, marker, pattern, title, desc, metadata, style";
const found = {};

const report = (kind, sentence) => {
  (found[kind] ??= new Set()).add(sentence);
};
const quoted = (text) => {
  const line = text.trim().replace(/\s+/g, " ");
  return `"${line.length > 40 ? line.slice(0, 37) + "..." : line}"`;
};
const named = (e) => {
  const box = e.getBoundingClientRect();
  const classes = [...e.classList].slice(0, 2).map((c) => "." + c).join("");
  const [x, y] = [box.left + scrollX, box.top + scrollY].map(Math.round);
  return `<${e.localName}${e.id ? "#" + e.id : classes}> at ${x}, ${y}`;
};
const shown = (e) => e.checkVisibility({ visibilityProperty: true, opacityProperty: true });
const styles = new Map();
const styleOf = (e) => {
  if (!styles.has(e)) styles.set(e, getComputedStyle(e));
  return styles.get(e);
};

// ---------------------------------------------------------------------------------------------- colours
const parsed = (colour) => {
  const [r, g, b, a = 1] = (colour.match(/-?[\d.]+%?/g) ?? [0, 0, 0, 0]).map((v) =>
    String(v).endsWith("%") ? parseFloat(v) / 100 : parseFloat(v));
  const scale = colour.startsWith("color(") ? 255 : 1;
  return [r * scale, g * scale, b * scale, a];
};
const luminance = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map((v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const over = ([r, g, b, a], [x, y, z]) => [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a), 1];
const white = (colour) => colour[3] > 0.5 && luminance(colour) > BLANK;
const backgrounds = new Map();
const background = (e) => {
  const canvas = dark && styleOf(document.documentElement).colorScheme.includes("dark") ? 18 : 255;
  if (!e) return [canvas, canvas, canvas, 1];
  if (!backgrounds.has(e)) backgrounds.set(e, over(parsed(styleOf(e).backgroundColor), background(e.parentElement)));
  return backgrounds.get(e);
};

// ---------------------------------------------------------------------------------------------- boxes that cut
// The part of the page in which an element is seen: null inside a box that scrolls.
const windows = new Map();
const seen = (e) => {
  if (!e || e === document.documentElement || e === document.body)
    return { left: -Infinity, right: document.documentElement.clientWidth, top: -Infinity, bottom: Infinity, by: null };
  if (windows.has(e)) return windows.get(e);
  const up = seen(e.parentElement);
  if (!up) return up;
  const style = styleOf(e), box = e.getBoundingClientRect();
  let part = up;
  if (["auto", "scroll"].includes(style.overflowX)) part = null;
  else if (style.display !== "inline" && /hidden|clip/.test(style.overflowX + style.overflowY)) {
    part = { ...part };
    if (/hidden|clip/.test(style.overflowX)) {
      if (box.right < part.right) Object.assign(part, { right: box.right, by: e });
      if (box.left > part.left) Object.assign(part, { left: box.left, by: e });
    }
    if (/hidden|clip/.test(style.overflowY)) {
      if (box.bottom < part.bottom) Object.assign(part, { bottom: box.bottom, by: e });
      if (box.top > part.top) Object.assign(part, { top: box.top, by: e });
    }
  }
  windows.set(e, part);
  return part;
};
const cut = (box, part) => {
  if (!part || box.width <= 1 || box.height <= 1) return null;
  if (box.right > part.right + SLACK || box.left < Math.max(part.left, 0) - SLACK) return "at the side";
  const slack = box.height / 4;
  return box.bottom > part.bottom + slack || box.top < part.top - slack ? "above or below" : null;
};
const cutOff = (what, box, e) => {
  const part = seen(e), side = cut(box, part);
  if (side) report("cut", `${what} is cut off ${side}, by ${part.by ? named(part.by) : "the window"}`);
};

// ---------------------------------------------------------------------------------------------- text
const SKIPPED = `${THEME}, svg, script, style, noscript, template`;
const texts = function* (root) {
  const kinds = new Set(); // of words in boxes that scroll: one of each kind is enough
  const kind = (e) => `${e.localName} ${e.className}`;
  const accept = (node) => {
    if (node.nodeType === 3) return NodeFilter.FILTER_ACCEPT;
    const repeats = !node.childElementCount && kinds.has(kind(node)) && !seen(node.parentElement);
    return repeats || node.matches(SKIPPED) || !shown(node) ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_SKIP;
  };
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT, accept);
  for (let node; (node = walker.nextNode()); ) {
    const e = node.parentElement, scrolls = !seen(e);
    if (!/\S/.test(node.data) || scrolls && kinds.has(kind(e))) continue;
    if (scrolls) kinds.add(kind(e));
    yield [node, e];
  }
};
const range = document.createRange();
const checkText = () => {
  const pairs = new Map();
  for (const [node, e] of texts(document.body)) {
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (box.width <= 1 || box.height <= 1) continue;
    cutOff(quoted(node.data), box, e);
    const key = styleOf(e).color + background(e);
    if (!pairs.has(key)) pairs.set(key, [node, e]);
  }
  for (const [node, e] of pairs.values()) {
    const behind = background(e), ink = over(parsed(styleOf(e).color), behind);
    const [least, most] = [luminance(ink), luminance(behind)].sort((x, y) => x - y);
    const ratio = (most + 0.05) / (least + 0.05);
    if (ratio < 4.45 && parseFloat(styleOf(e).fontSize) < 24)
      report("contrast", `${quoted(node.data)} has a contrast of ${ratio.toFixed(1)} to 1, expected 4.5 at least`);
  }
};
const checkEmphasis = () => {
  for (const e of document.querySelectorAll("em, strong, i, b")) {
    if (e.closest("pre, svg") || !e.textContent) continue;
    const before = e.previousSibling?.nodeType === 3 ? e.previousSibling.data : "";
    const after = e.nextSibling?.nodeType === 3 ? e.nextSibling.data : "";
    const touches = /[\p{L}\p{N}_]$/u.test(before) && /^[\p{L}\p{N}_]/u.test(e.textContent)
      || /[\p{L}\p{N}_]$/u.test(e.textContent) && /^[\p{L}\p{N}_]/u.test(after);
    if (touches) report("emphasis", `an emphasis begins or ends inside a word: ${
      quoted(before.slice(-12) + e.textContent.slice(0, 16) + (e.textContent.length > 16 ? "" : after.slice(0, 10)))}`);
  }
};

// ---------------------------------------------------------------------------------------------- pictures
// The corners of the box of a text in a picture, smaller by a fifth of its height than what the font allows for.
const corners = (e) => {
  const box = e.getBBox(), m = e.getScreenCTM();
  if (!m || !box.width || !box.height) return null;
  const y = box.y + box.height * 0.2, bottom = box.y + box.height * 0.8;
  const at = (x, y) => [m.a * x + m.c * y + m.e, m.b * x + m.d * y + m.f];
  return [at(box.x, y), at(box.x + box.width, y), at(box.x + box.width, bottom), at(box.x, bottom)];
};
const meet = (p, q) => {
  for (const one of [p, q])
    for (const k of [0, 1]) {
      const axis = [one[k + 1][1] - one[k][1], one[k][0] - one[k + 1][0]];
      const length = Math.hypot(...axis) || 1;
      const along = (points) => points.map(([x, y]) => (x * axis[0] + y * axis[1]) / length);
      const a = along(p), b = along(q);
      if (Math.min(...a) > Math.max(...b) - SLACK || Math.min(...b) > Math.max(...a) - SLACK) return false;
    }
  return true;
};
const fontSize = (e) => {
  const glyphs = e.localName === "g"; // Matplotlib's outlines of a font of 100 pixels
  const m = (glyphs && e.querySelector("g[transform*=scale]") || e).getScreenCTM();
  return (glyphs ? 100 : parseFloat(styleOf(e).fontSize)) * Math.sqrt(Math.abs(m.a * m.d - m.b * m.c));
};
// A box that is painted after a label hides it.
const checkCovered = (svg, labels, name) => {
  const boxes = [...svg.querySelectorAll("rect")].filter((e) => !e.closest(PARTS) && shown(e) && opaque(e))
    .map((e) => [e, e.getBoundingClientRect()]);
  for (const { e, text, box } of labels) {
    const covers = ([rect, r]) => Math.min(r.right, box.right) - Math.max(r.left, box.left) > 2 * SLACK
      && Math.min(r.bottom, box.bottom) - Math.max(r.top, box.top) > box.height / 4
      && e.compareDocumentPosition(rect) & Node.DOCUMENT_POSITION_FOLLOWING;
    if (boxes.some(covers)) report("covered", `${quoted(text)} is covered by a box in picture ${name}`);
  }
};
const opaque = (e) => {
  const { fill, fillOpacity, opacity } = styleOf(e);
  return fill !== "none" && parsed(fill)[3] * fillOpacity * opacity > 0.5;
};
const checkPicture = (svg, name) => {
  const frame = svg.getBoundingClientRect();
  const ofGlyphs = [...svg.querySelectorAll('g[id^="text_"]')].filter((g) => !g.querySelector("text")); // Matplotlib's
  const labels = [...svg.querySelectorAll("text"), ...ofGlyphs]
    .filter((e) => !e.closest(PARTS) && shown(e))
    .map((e) => ({ e, text: e.textContent.trim() || e.id, box: e.getBoundingClientRect(), points: corners(e) }))
    .filter((label) => label.points);
  for (const { e, text, box } of labels) {
    const outside = box.right > frame.right + SLACK || box.left < frame.left - SLACK
      || box.bottom > frame.bottom + box.height / 4 || box.top < frame.top - box.height / 4;
    if (outside) report("outside", `${quoted(text)} is cut off by its picture ${name}`);
    const size = fontSize(e);
    if (Math.round(size * 10) < SMALLEST * 10)
      report("small", `the text of picture ${name} is ${size.toFixed(1)} pixels high, expected ${SMALLEST} at least`);
  }
  labels.sort((x, y) => x.box.left - y.box.left);
  labels.forEach((one, k) => {
    for (const other of labels.slice(k + 1)) {
      if (other.box.left > one.box.right) break;
      const copy = other.text === one.text && Math.abs(other.box.left - one.box.left) < 2;
      if (!copy && meet(one.points, other.points))
        report("overlap", `${quoted(one.text)} and ${quoted(other.text)} lie over one another in picture ${name}`);
    }
  });
  checkCovered(svg, labels, name);
  if (!dark) return;
  for (const e of svg.querySelectorAll("rect, path, polygon")) {
    const box = e.getBoundingClientRect();
    if (box.width * box.height < 0.2 * frame.width * frame.height || e.closest(PARTS) || !shown(e)) continue;
    if (opaque(e) && white(parsed(styleOf(e).fill))) report("white", `picture ${name} is a white box in dark mode`);
  }
};
const fileOf = (img) => img.currentSrc.split("/").pop().split("#")[0];
const titled = (svg) => quoted(svg.closest("figure")?.querySelector("figcaption")?.textContent
  || svg.querySelector("title")?.textContent || svg.getAttribute("aria-label") || svg.id || named(svg));
const checkInline = () => {
  for (const svg of document.querySelectorAll("svg")) {
    if (svg.ownerSVGElement || svg.closest(THEME) || !shown(svg)) continue;
    const box = svg.getBoundingClientRect();
    if (box.width < 48) continue; // an icon
    cutOff(`picture ${titled(svg)}`, box, svg.parentElement);
    checkPicture(svg, titled(svg));
  }
};
// A picture of a figure or of a file opens large, unless the page's policy forbids scripts.
const EVENTS = [new MouseEvent("click", { cancelable: true }), new KeyboardEvent("keydown", { key: "Enter" })];
const checkOpens = () => {
  if (document.querySelector('meta[http-equiv="Content-Security-Policy"]')) return;
  for (const picture of document.querySelectorAll("figure svg, .picture a")) {
    const drawn = picture.querySelector("img") ?? picture; // a browser makes a click of Enter on a link
    if (!shown(drawn)) continue;
    const name = drawn === picture ? titled(picture) : fileOf(drawn);
    for (const event of drawn === picture ? EVENTS : EVENTS.slice(0, 1)) {
      picture.dispatchEvent(event);
      const dialog = document.querySelector("dialog[open]"), large = dialog?.querySelector("svg, img");
      const opens = large?.getBoundingClientRect().width > drawn.getBoundingClientRect().width;
      if (!opens || picture.tabIndex < 0) report("opens", `picture ${name} does not open large by ${event.type}`);
      dialog?.close();
    }
  }
};
// A picture in a file of its own is laid out once more, inline, where its text can be measured.
const checkFile = async (img) => {
  const name = fileOf(img);
  const text = await (await fetch(img.currentSrc)).text();
  const svg = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
  if (svg.localName !== "svg") return;
  const host = document.createElement("div"), { width, height } = img.getBoundingClientRect();
  host.style.cssText = "all: initial; position: absolute; left: 0; top: 0; opacity: .999";
  document.body.append(host);
  svg.setAttribute("width", width), svg.setAttribute("height", height);
  host.attachShadow({ mode: "open" }).append(document.importNode(svg, true));
  checkPicture(host.shadowRoot.querySelector("svg"), name);
  host.remove();
};
const edges = (img) => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 32, height: 32 });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(img, 0, 0, 32, 32);
  return [[1, 1], [16, 1], [30, 1], [1, 16], [30, 16], [1, 30], [16, 30], [30, 30]].map(([x, y]) => {
    const [r, g, b, a] = context.getImageData(x, y, 1, 1).data;
    return [r, g, b, a / 255];
  });
};
const checkImages = async () => {
  for (const img of document.images) {
    if (img.closest(THEME) || !shown(img)) continue;
    const name = fileOf(img);
    await img.decode().catch(() => {});
    if (!img.naturalWidth) report("missing", `picture ${name} does not load`);
    else {
      cutOff(`picture ${name}`, img.getBoundingClientRect(), img.parentElement);
      if (dark && edges(img).filter(white).length >= 4) report("white", `picture ${name} is a white box in dark mode`);
      if (/\.svg(#|$)/.test(img.currentSrc)) await checkFile(img);
    }
  }
};
const checkBoxes = () => {
  if (!dark) return;
  for (const e of document.body.querySelectorAll("*:not(svg *, pre *)")) {
    if (!white(parsed(styleOf(e).backgroundColor)) || !shown(e) || e.closest(".md-search, .md-overlay")) continue;
    const box = e.getBoundingClientRect();
    if (box.width * box.height >= 400) report("white", `${named(e)} is a white box in dark mode`);
  }
  if (white(background(document.body))) report("white", "the page is white in dark mode");
};

(async () => {
  const wider = document.documentElement.scrollWidth - innerWidth;
  if (wider > 0) report("wide", `the page is ${wider} pixels wider than the window`);
  checkText();
  checkEmphasis();
  checkInline();
  checkOpens();
  checkBoxes();
  await checkImages();
  const sentences = Object.values(found).flatMap((all) => {
    const some = [...all].slice(0, MOST);
    return all.size > MOST ? [...some, `${all.size - MOST} more like this: ${[...all][MOST]}`] : some;
  });
  return sentences;
})().then((sentences) => done({ sentences }), (error) => done({ sentences: [`the check fails: ${error.stack}`] }));
