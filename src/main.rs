fn main() {
    println!("{:?}", coracle::probe());
}
