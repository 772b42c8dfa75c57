// The theme: the system's, or the one that was chosen here.
const choice = document.getElementById("theme");

function apply(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  document.dispatchEvent(new Event("theme"));
}

choice.value = localStorage.getItem("theme") ?? "";
apply(choice.value);
choice.addEventListener("change", () => {
  localStorage.setItem("theme", choice.value);
  apply(choice.value);
});
// What is painted by a script is painted anew.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("theme")));
