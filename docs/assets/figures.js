// A picture in a page opens as large as the window, on a click, Enter or the space bar; a click or Escape closes it.
const LEAST = 1.5; // times its size in the page

const opened = (shown) => {
  const dialog = document.createElement("dialog"), picture = shown.cloneNode(true);
  const { width, height } = shown.getBoundingClientRect();
  const times = Math.max(LEAST, Math.min((innerWidth - 48) / width, (innerHeight - 48) / height));
  dialog.setAttribute("aria-label", shown.querySelector("title")?.textContent ?? shown.getAttribute("alt") ?? "");
  ["tabindex", "aria-haspopup", "aria-labelledby"].forEach((name) => picture.removeAttribute(name));
  picture.querySelectorAll("[id]").forEach((e) => e.removeAttribute("id")); // those of the picture in the page
  picture.setAttribute("role", "img");
  Object.assign(picture.style, { width: `${times * width}px`, height: `${times * height}px` });
  dialog.append(picture);
  dialog.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  shown.closest("figure, .picture").after(dialog); // where the same style sheet applies
  dialog.showModal();
};

for (const svg of document.querySelectorAll("figure svg")) {
  for (const [name, value] of Object.entries({ role: "button", tabindex: "0", "aria-haspopup": "dialog" }))
    svg.setAttribute(name, value);
  svg.addEventListener("click", () => opened(svg));
  svg.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    opened(svg);
  });
}

// A picture in a file of its own is a link to the file, for readers without scripts and for a tab of its own.
for (const link of document.querySelectorAll(".picture a")) {
  link.setAttribute("aria-haspopup", "dialog");
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    opened(link.querySelector("img"));
  });
}
