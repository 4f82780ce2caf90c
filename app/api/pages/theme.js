// Light and dark: the system's choice until the reader makes another one, which is remembered.
const KEY = "manta.theme";
const root = document.documentElement;
const system = matchMedia("(prefers-color-scheme: dark)");

const current = () => root.dataset.theme || (system.matches ? "dark" : "light");

function show(button) {
  const other = current() === "dark" ? "light" : "dark";
  button.textContent = other === "dark" ? "Dark" : "Light";
  button.setAttribute("aria-label", `Switch to the ${other} theme`);
}

export function installTheme(button) {
  const chosen = localStorage.getItem(KEY);
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  show(button);
  system.addEventListener("change", () => show(button));
  button.addEventListener("click", () => {
    root.dataset.theme = current() === "dark" ? "light" : "dark";
    localStorage.setItem(KEY, root.dataset.theme);
    show(button);
  });
}
