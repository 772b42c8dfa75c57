// LaTeX as a tree of MathML nodes. Styles are set on nodes, not written as attributes, which the page's policy refuses.
import temml from "temml";

function styled(node) {
  const written = node.attributes?.style;
  if (written) {
    for (const rule of written.split(";").filter(Boolean)) {
      const [name, value] = rule.split(":").map((part) => part.trim());
      node.style[name.replace(/-([a-z])/g, (_, letter) => letter.toUpperCase())] = value;
    }
    delete node.attributes.style;
  }
  for (const child of node.children ?? []) styled(child);
  return node;
}

// Throws where the formula cannot be read.
export function math(formula, isBlock) {
  const options = { displayMode: isBlock, throwOnError: true, trust: false, maxExpand: 500, maxSize: [10, 20] };
  return styled(temml.__renderToMathMLTree(formula, options)).toNode();
}
