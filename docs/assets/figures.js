// A picture in a page opens as large as the window, on a click, Enter or the space bar; a click or Escape closes it.
const LEAST = 1.5; // times its size in the page

const opened = (svg) => {
  const dialog = document.createElement("dialog"), picture = svg.cloneNode(true);
  const { width, height } = svg.getBoundingClientRect();
  const times = Math.max(LEAST, Math.min((innerWidth - 48) / width, (innerHeight - 48) / height));
  dialog.setAttribute("aria-label", svg.querySelector("title")?.textContent ?? "");
  ["tabindex", "aria-haspopup", "aria-labelledby"].forEach((name) => picture.removeAttribute(name));
  picture.querySelectorAll("[id]").forEach((e) => e.removeAttribute("id")); // those of the picture in the page
  picture.setAttribute("role", "img");
  Object.assign(picture.style, { width: `${times * width}px`, height: `${times * height}px` });
  dialog.append(picture);
  dialog.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  svg.closest("figure").after(dialog); // where the same style sheet applies
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
