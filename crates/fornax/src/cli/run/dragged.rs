//! Paths of images in what is typed: a terminal writes the path of a file that is dragged into it, in quotes or with
//! backslashes.

use std::path::{Path, PathBuf};

/// A message, and the files whose paths stood in it.
#[derive(Debug, PartialEq)]
pub(super) struct Dragged {
    pub(super) paths: Vec<PathBuf>,
    pub(super) text: String,
}

/// What a name ends with whose file is an image.
const ENDS: [&str; 5] = [".jpg", ".jpeg", ".png", ".webp", ".gif"];

impl Dragged {
    /// Takes paths of images out of a message: those that begin at a root, at home or at this folder, of files that are
    /// there. Everything else stays as it is.
    pub(super) fn of(message: &str, home: Option<&Path>, is_file: impl Fn(&Path) -> bool) -> Dragged {
        let (mut paths, mut text, mut rest) = (Vec::new(), String::new(), message);
        while !rest.is_empty() {
            let spaces = rest.len() - rest.trim_start().len();
            let word = Word::first(&rest[spaces..]);
            let end = spaces + word.bytes;
            match word.path(home).filter(|path| is_file(path)) {
                Some(path) => paths.push(path),
                None => text.push_str(&rest[..end]),
            }
            rest = &rest[end..];
        }
        match paths.is_empty() {
            true => Dragged { paths, text: message.to_owned() },
            false => Dragged { paths, text: text.trim().to_owned() },
        }
    }
}

/// What stands up to the next space that is neither quoted nor behind a backslash.
struct Word {
    /// Without quotes and backslashes.
    plain: String,
    /// As it is written.
    bytes: usize,
}

impl Word {
    fn first(text: &str) -> Word {
        let (mut plain, mut quote, mut bytes) = (String::new(), None, 0);
        let mut chars = text.chars();
        while let Some(c) = chars.next() {
            match (c, quote) {
                (c, None) if c.is_whitespace() => break,
                ('\'' | '"', None) => quote = Some(c),
                (c, Some(open)) if c == open => quote = None,
                ('\\', None) => {
                    if let Some(next) = chars.next() {
                        plain.push(next);
                        bytes += next.len_utf8();
                    }
                }
                (c, _) => plain.push(c),
            }
            bytes += c.len_utf8();
        }
        Word { plain, bytes }
    }

    fn path(&self, home: Option<&Path>) -> Option<PathBuf> {
        let name = self.plain.to_ascii_lowercase();
        if !ENDS.iter().any(|end| name.ends_with(end)) {
            return None;
        }
        let plain = self.plain.strip_prefix("file://").unwrap_or(&self.plain);
        match plain.strip_prefix("~/") {
            Some(below) => home.map(|home| home.join(below)),
            None => {
                ["/", "./", "../"].iter().any(|begin| plain.starts_with(begin)).then(|| PathBuf::from(plain))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_images_are_taken_out_of_a_message_and_nothing_else() {
        let check = |message: &str, paths: &[&str], text: &str| {
            let there = |path: &Path| !path.to_string_lossy().contains("missing");
            let wanted = Dragged { paths: paths.iter().map(PathBuf::from).collect(), text: text.to_owned() };
            assert_eq!(Dragged::of(message, Some(Path::new("/at/ann")), there), wanted, "{message:?}");
        };
        check("/tmp/cat.png", &["/tmp/cat.png"], "");
        check("'/tmp/my cat.JPG' What is it?", &["/tmp/my cat.JPG"], "What is it?");
        check(
            "Compare /a/b\\ c.webp  and  \"/d e.gif\" now",
            &["/a/b c.webp", "/d e.gif"],
            "Compare  and now",
        );
        check("~/x.jpeg file:///y.png ./z.png", &["/at/ann/x.jpeg", "/y.png", "./z.png"], "");
        check(
            "  What is cat.png, /etc/passwd or /missing.png? ",
            &[],
            "  What is cat.png, /etc/passwd or /missing.png? ",
        );
        check("it\'s 'open", &[], "it\'s 'open");
        check("ends with a backslash\\", &[], "ends with a backslash\\");
        check("two\nlines /a.png\nand more", &["/a.png"], "two\nlines\nand more");
    }
}
